//! TLS without a socket, and libpq's ways of checking a server's certificate.
//!
//! | sslmode | authorities | name |
//! | --- | --- | --- |
//! | prefer, require | not checked | not checked |
//! | prefer, require with sslrootcert | those | not checked |
//! | verify-ca | those of sslrootcert | not checked |
//! | verify-full | those of sslrootcert, or the system's | must be the host's |
//!
//! Unlike libpq, a name counts only where X.509 has it today (subjectAltName, not the common name), and a certificate of
//! an authority is not taken as a server's own.

use std::{
    fmt, fs,
    io::{self, Read, Write},
    sync::Arc,
};

use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    server::ParsedCertificate,
};

use super::{
    config::{Config, Host, RootCerts, SslMode},
    error::TlsError,
};

/// How connections to a server are encrypted: read from the settings once for each connection.
#[derive(Clone)]
pub struct TlsSettings {
    client: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsSettings {
    /// The settings; `None` where there is no TLS. Reads files: it blocks.
    pub fn read(config: &Config) -> Result<Option<Self>, TlsError> {
        let Host::Tcp { host, .. } = &config.host else { return Ok(None) };
        let check = match (config.ssl_mode, &config.root_certs) {
            (SslMode::Disable, _) => return Ok(None),
            (SslMode::VerifyFull, _) => Check::Full,
            (SslMode::Prefer | SslMode::Require, RootCerts::System) => Check::Nothing,
            _ => Check::Chain,
        };
        let name = match ServerName::try_from(host.clone()) {
            Ok(name) => name,
            // The name is sent to the server, but only a full check looks at it.
            Err(_) if check != Check::Full => {
                ServerName::try_from("unnamed").map_err(|_| TlsError::Name(host.clone()))?
            }
            Err(_) => return Err(TlsError::Name(host.clone())),
        };
        let provider = Arc::new(ring::default_provider());
        let builder =
            ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let client = match check {
            Check::Full => builder.with_root_certificates(roots(&config.root_certs)?).with_no_client_auth(),
            Check::Chain => {
                let verifier = Lax::new(&provider, Some(roots(&config.root_certs)?));
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
            }
            Check::Nothing => {
                let verifier = Lax::new(&provider, None);
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
            }
        };
        Ok(Some(Self { client: Arc::new(client), name }))
    }

    /// The settings as rustls has them, for a client other than this crate's.
    pub fn client_config(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    pub(crate) fn connect(&self) -> Result<Tls, String> {
        let connection = ClientConnection::new(Arc::clone(&self.client), self.name.clone());
        Ok(Tls { connection: connection.map_err(|error| explained(&error))? })
    }
}

impl fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSettings").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How much of a certificate is checked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Check {
    Nothing,
    Chain,
    Full,
}

fn roots(certs: &RootCerts) -> Result<RootCertStore, TlsError> {
    match certs {
        RootCerts::System => system_roots(),
        RootCerts::Pem(pem) => pem_roots(pem),
        RootCerts::File(path) => {
            pem_roots(&fs::read(path).map_err(|source| TlsError::File { path: path.clone(), source })?)
        }
    }
}

fn pem_roots(pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| TlsError::Certificate(error.to_string()))?;
        roots.add(certificate).map_err(|error| TlsError::Certificate(error.to_string()))?;
    }
    if roots.is_empty() { Err(TlsError::Certificate("the file has none".to_owned())) } else { Ok(roots) }
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Stores hold certificates that are older than the rules; one of them must not bar the others.
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        let why = found.errors.first().map_or_else(|| "there are none".to_owned(), ToString::to_string);
        return Err(TlsError::System(why));
    }
    Ok(roots)
}

/// Takes any name; and with no roots, any certificate.
struct Lax {
    roots: Option<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Lax {
    fn new(provider: &CryptoProvider, roots: Option<RootCertStore>) -> Self {
        Self { roots, algorithms: provider.signature_verification_algorithms }
    }
}

impl ServerCertVerifier for Lax {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if let Some(roots) = &self.roots {
            let certificate = ParsedCertificate::try_from(end_entity)?;
            let algorithms = self.algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&certificate, roots, intermediates, now, algorithms)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // Who may be anybody need not prove to be somebody; and certificates made by PostgreSQL's own manual (X.509
        // version 1) could not be read here.
        match self.roots {
            None => Ok(HandshakeSignatureValid::assertion()),
            Some(_) => verify_tls12_signature(message, certificate, signature, &self.algorithms),
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        match self.roots {
            None => Ok(HandshakeSignatureValid::assertion()),
            Some(_) => verify_tls13_signature(message, certificate, signature, &self.algorithms),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl fmt::Debug for Lax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lax")
    }
}

/// What rustls says, and where it helps, what to do.
fn explained(error: &rustls::Error) -> String {
    let advice = match error {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "; name the authority that signed it with sslrootcert="
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "; connect by a name of the certificate, or use sslmode=verify-ca with sslrootcert=",
        rustls::Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "; renew the server's certificate"
        }
        _ => "",
    };
    format!("{error}{advice}")
}

/// One connection.
pub(crate) struct Tls {
    connection: ClientConnection,
}

impl Tls {
    /// Whether the handshake is still going on.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Encrypts `plain`, which it empties, and appends what is to be sent. During the handshake it is kept for later.
    pub(crate) fn encrypt(&mut self, plain: &[u8], output: &mut Vec<u8>) -> Result<(), String> {
        // What may be buffered is bounded by who wrote it.
        self.connection.set_buffer_limit(None);
        self.connection.writer().write_all(plain).map_err(|error| error.to_string())?;
        self.flush(output)
    }

    /// Appends what is to be sent.
    pub(crate) fn flush(&mut self, output: &mut Vec<u8>) -> Result<(), String> {
        while self.connection.wants_write() {
            self.connection.write_tls(output).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Decrypts what arrived, and hands it out in pieces.
    pub(crate) fn decrypt(
        &mut self,
        mut bytes: &[u8],
        output: &mut Vec<u8>,
        on: &mut impl FnMut(&[u8]),
    ) -> Result<(), String> {
        let mut piece = [0; 4096];
        while !bytes.is_empty() {
            self.connection.read_tls(&mut bytes).map_err(|error| error.to_string())?;
            let state = self.connection.process_new_packets();
            // An alert that says why is worth sending.
            self.flush(output)?;
            state.map_err(|error| explained(&error))?;
            loop {
                match self.connection.reader().read(&mut piece) {
                    // After the peer's close_notify nothing more comes; whoever reads the socket sees its end.
                    Ok(0) => return Ok(()),
                    Ok(length) => on(&piece[..length]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error.to_string()),
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}
