//! The `sluice` command.
use std::sync::mpsc;
use sluice::{config::Settings, control::Control, server};
fn main() {
    tracing_subscriber::fmt().init();
    let mut settings = Settings::default();
    let args: Vec<String> = std::env::args().collect();
    for pair in args[1..].chunks(2) {
        match pair[0].as_str() {
            "--cores" => settings.cores = sluice::config::Cores::List(pair[1].split(',').map(|x| x.parse().unwrap()).collect()),
            "--listen-resp" => settings.resp.listen = pair[1].parse().unwrap(),
            "--listen-ops" => settings.ops.listen = pair[1].parse().unwrap(),
            "--listen-unix" => settings.resp.listen_unix = Some(pair[1].clone().into()),
            "--policy" => settings.policy = Some(pair[1].clone().into()),
            "--transport" => settings.transport.kind = if pair[1] == "ring" { sluice::listener::TransportChoice::Ring } else { sluice::listener::TransportChoice::Plain },
            "--busy-poll-us" => settings.transport.busy_poll_us = pair[1].parse().unwrap(),
            _ => {}
        }
    }
    let control = Control::new(settings.policy.clone(), 1, settings.limits.rules_max).unwrap();
    let (tx, rx) = mpsc::channel();
    let mut signals = signal_hook::iterator::Signals::new([15, 2, 1]).unwrap();
    std::thread::spawn(move || for s in signals.forever() { let _ = tx.send(if s == 1 { server::Request::Reload } else { server::Request::Leave }); });
    server::run(settings, None, control, &rx, |p| tracing::info!("listening {}", p.resp_address)).unwrap();
}
