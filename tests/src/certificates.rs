//! Certificates for servers of the rig, made on the spot.

use std::{fs, path::Path, process::Command};

/// Writes `ca.crt`, `server.crt` and `server.key` for two days into the folder. The configuration is complete, so that
/// the machine's own has no say.
pub(crate) fn make(folder: &Path) {
    const CONFIG: &str = "
[req]
distinguished_name = name
prompt = no
[name]
CN = localhost
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = DNS:localhost
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
";
    fs::write(folder.join("tls.conf"), CONFIG).expect("writing the configuration");
    let make = |more: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        command.args(["-days", "2", "-config", "tls.conf"]).args(more).current_dir(folder);
        let output = command.output().expect("running openssl (`tests/run tools` installs it)");
        assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    };
    make(&["-extensions", "ca", "-subj", "/CN=Sluice tests", "-keyout", "ca.key", "-out", "ca.crt"]);
    let signed = ["-extensions", "server", "-CA", "ca.crt", "-CAkey", "ca.key"];
    make(&[&signed[..], &["-keyout", "server.key", "-out", "server.crt"]].concat());
}
