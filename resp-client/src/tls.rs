//! TLS without a socket: rustls, fed with the bytes that arrived, asked for the bytes to send.

use std::{
    fmt,
    io::{self, Read, Write},
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use thiserror::Error;

use crate::config::{Address, Secret};

/// How servers are checked, and how the client shows who it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsConfig {
    /// Certificates (PEM) of the authorities that are trusted, in place of the system's.
    pub ca_pem: Option<Vec<u8>>,
    /// The name that certificates must have, in place of the host of the address.
    pub server_name: Option<String>,
    /// The client's certificate chain (PEM) and private key (PEM), for servers that ask for one.
    pub identity_pem: Option<(Vec<u8>, Secret)>,
}

/// What is wrong with the TLS settings.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A certificate cannot be read, or the file has none.
    #[error("no certificate can be read: {0}")]
    Certificate(String),
    /// The private key cannot be read.
    #[error("the private key cannot be read")]
    Key,
    /// The system's certificate authorities cannot be read.
    #[error("the system's certificate authorities cannot be read: {0}")]
    System(String),
    /// rustls refuses the settings.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
}

/// The settings, read once.
#[derive(Clone)]
pub(crate) struct TlsClient {
    config: Arc<ClientConfig>,
    server_name: Option<String>,
}

impl TlsClient {
    pub(crate) fn new(settings: &TlsConfig) -> Result<Self, TlsError> {
        let roots = match &settings.ca_pem {
            Some(pem) => roots(certificates(pem)?)?,
            None => system_roots()?,
        };
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let config = match &settings.identity_pem {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key.reveal()).map_err(|_| TlsError::Key)?;
                config.with_client_auth_cert(certificates(chain)?, key)?
            }
        };
        Ok(Self { config: Arc::new(config), server_name: settings.server_name.clone() })
    }

    pub(crate) fn connect(&self, address: &Address) -> Result<Tls, String> {
        let name = self.server_name.as_deref().or(address.host()).unwrap_or_default();
        let name = ServerName::try_from(name.to_owned()).map_err(|error| error.to_string())?;
        let connection = ClientConnection::new(Arc::clone(&self.config), name).map_err(|error| error.to_string())?;
        Ok(Tls { connection, output: Vec::new() })
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let all = all.map_err(|error| TlsError::Certificate(error.to_string()))?;
    if all.is_empty() { Err(TlsError::Certificate("the file has none".to_owned())) } else { Ok(all) }
}

fn roots(certificates: Vec<CertificateDer<'static>>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates {
        roots.add(certificate).map_err(|error| TlsError::Certificate(error.to_string()))?;
    }
    Ok(roots)
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

/// One connection.
pub(crate) struct Tls {
    connection: ClientConnection,
    /// Encrypted bytes to send, for a caller that wants them as a slice.
    output: Vec<u8>,
}

impl Tls {
    /// Encrypts `plain`, and appends what is to be sent; empties `plain`.
    pub(crate) fn encrypt(&mut self, plain: &mut Vec<u8>) -> Result<(), String> {
        // The session buffers without a limit only what the link's own limit let through.
        self.connection.set_buffer_limit(None);
        self.connection.writer().write_all(plain).map_err(|error| error.to_string())?;
        plain.clear();
        self.flush()
    }

    fn flush(&mut self) -> Result<(), String> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.output).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Encrypted bytes that wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.output.len()
    }

    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Decrypts what arrived, and appends it to `plain`.
    pub(crate) fn decrypt(&mut self, mut bytes: &[u8], plain: &mut Vec<u8>) -> Result<(), String> {
        while !bytes.is_empty() {
            self.connection.read_tls(&mut bytes).map_err(|error| error.to_string())?;
            let state = self.connection.process_new_packets();
            // An alert that says why is worth sending.
            self.flush()?;
            let ready = state.map_err(|error| error.to_string())?.plaintext_bytes_to_read();
            self.take(ready, plain)?;
        }
        Ok(())
    }

    fn take(&mut self, ready: usize, plain: &mut Vec<u8>) -> Result<(), String> {
        let start = plain.len();
        plain.resize(start + ready, 0);
        match self.connection.reader().read_exact(&mut plain[start..]) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}
