//! Scripts and functions that the shard does not know yet.

use resp_client::{CallError, Code, LinkId, Micros, Script, ScriptId};

use crate::world::{DEADLINE_MS, Failure, World, ok};

fn world(script: Script) -> (World, LinkId) {
    World::single_with(|config| config.scripts = vec![script])
}

fn eval(world: &mut World, token: u64) -> Result<(), CallError> {
    let deadline = world.now + Micros::from_millis(DEADLINE_MS);
    world.client.evalsha(world.now, Some(5), token, deadline, ScriptId(0), 1, |command| {
        command.word(b"key").integer(17);
    })
}

const SHA1: &str = "e0e1f9fabfc9d4800c877a703b823ac0578ff8db";

#[test]
fn noscript_loads_once_and_calls_again() {
    let (mut world, link) = world(Script::by_hash("return 1"));
    let call = ["EVALSHA", SHA1, "1", "key", "17"];
    for token in 0..3 {
        eval(&mut world, token).expect("room");
    }
    assert_eq!(world.sent(link), vec![call.to_vec(); 3]);
    world.reply(link, "-NOSCRIPT No matching script. Please use EVAL.\r\n");
    assert_eq!(world.sent(link), [&["SCRIPT", "LOAD", "return 1"][..], &call[..]]);
    world.reply(link, "-NOSCRIPT x\r\n-NOSCRIPT x\r\n");
    assert_eq!(world.sent(link), vec![call.to_vec(); 2], "one load is enough");
    world.reply(link, "$3\r\nsha\r\n:1\r\n:2\r\n:3\r\n");
    assert_eq!(world.outcomes(), [(0, ok(1)), (1, ok(2)), (2, ok(3))]);
    let total = world.client.counters().total();
    assert_eq!((total.no_script, total.script_loads, total.calls), (3, 1, 3));

    // SCRIPT FLUSH on the server: it is loaded again.
    eval(&mut world, 4).expect("room");
    world.sent(link);
    world.reply(link, "-NOSCRIPT x\r\n");
    assert_eq!(world.sent(link), [&["SCRIPT", "LOAD", "return 1"][..], &call[..]]);
    world.reply(link, "$3\r\nsha\r\n:4\r\n");
    assert_eq!(world.outcomes(), [(4, ok(4))]);
}

#[test]
fn a_script_that_cannot_be_loaded_ends() {
    let (mut world, link) = world(Script::by_hash("return 1"));
    eval(&mut world, 1).expect("room");
    world.sent(link);
    world.reply(link, "-NOSCRIPT x\r\n");
    for _ in 0..20 {
        if world.sent(link).is_empty() {
            break;
        }
        world.reply(link, "-NOPERM no SCRIPT for you\r\n-NOSCRIPT x\r\n");
    }
    assert_eq!(world.outcomes(), [(1, Err(Failure::Server(Code::NoScript)))]);
}

#[test]
fn a_retry_stays_inside_the_deadline() {
    let (mut world, link) = world(Script::by_hash("return 1"));
    eval(&mut world, 1).expect("room");
    world.sent(link);
    world.pass_ms(DEADLINE_MS - 1);
    world.reply(link, "-NOSCRIPT x\r\n");
    world.sent(link);
    world.pass_ms(1);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Timeout))]);
    world.reply(link, "$3\r\nsha\r\n:1\r\n");
    assert_eq!(world.outcomes(), []);
    assert_eq!(world.client.counters().total().late_replies, 1);
}

#[test]
fn functions() {
    let source = "#!lua name=sluice\nredis.register_function('take', function() return 1 end)";
    let (mut world, link) = world(Script::as_function(source, "take"));
    eval(&mut world, 1).expect("room");
    let call = ["FCALL", "take", "1", "key", "17"];
    assert_eq!(world.sent(link), [call]);
    world.reply(link, "-ERR Function not found\r\n");
    assert_eq!(world.sent(link), [&["FUNCTION", "LOAD", "REPLACE", source][..], &call[..]]);
    world.reply(link, "$6\r\nsluice\r\n:1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
}

#[test]
fn a_script_that_is_not_in_the_settings() {
    let (mut world, _) = World::single();
    assert_eq!(eval(&mut world, 1), Err(CallError::UnknownScript));
}
