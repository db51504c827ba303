//! Words to bytes: a command as RESP has it, an array of bulk strings.
//!
//! The array's header says how many words follow, and is the first thing on the wire, but the number is only known at
//! the end. So the buffer starts with room for the longest header, and `Encoder::finish` writes it there, right before
//! the first word:
//!
//! ```text
//! |........*3\r\n|$3\r\nSET\r\n…|
//!  ^ buffer ^ start              ^ end
//! ```

/// Room for `*` and ten digits and CRLF.
const HEADER_ROOM: usize = 13;

/// Writes one command into a buffer that is used again and again.
pub struct Encoder<'b> {
    buffer: &'b mut Vec<u8>,
    words: u32,
}

impl<'b> Encoder<'b> {
    /// Starts a command; what the buffer held is gone.
    #[inline]
    pub(crate) fn new(buffer: &'b mut Vec<u8>) -> Self {
        buffer.clear();
        buffer.extend_from_slice(&[0; HEADER_ROOM]);
        Self { buffer, words: 0 }
    }

    /// Adds a word of any bytes.
    #[inline]
    pub fn word(&mut self, word: &[u8]) -> &mut Self {
        self.length(word.len());
        self.buffer.reserve(word.len() + 2);
        self.buffer.extend_from_slice(word);
        self.buffer.extend_from_slice(b"\r\n");
        self.words += 1;
        self
    }

    /// Adds a word that is made of parts, such as a key with its prefix.
    #[inline]
    pub fn parts(&mut self, parts: &[&[u8]]) -> &mut Self {
        self.length(parts.iter().map(|part| part.len()).sum());
        for part in parts {
            self.buffer.extend_from_slice(part);
        }
        self.buffer.extend_from_slice(b"\r\n");
        self.words += 1;
        self
    }

    /// Adds a whole number.
    #[inline]
    pub fn integer(&mut self, value: impl itoa::Integer) -> &mut Self {
        let mut digits = itoa::Buffer::new();
        self.word(digits.format(value).as_bytes())
    }

    /// Adds several words.
    pub fn words<'w>(&mut self, words: impl IntoIterator<Item = &'w [u8]>) -> &mut Self {
        for word in words {
            self.word(word);
        }
        self
    }

    /// Adds words that are written already, with their framing. It is the caller's business that they are as many as it says:
    /// where they are not, the server closes the connection over a protocol error.
    #[inline]
    pub fn written(&mut self, bytes: &[u8], words: u32) -> &mut Self {
        self.buffer.extend_from_slice(bytes);
        self.words += words;
        self
    }

    #[inline]
    fn length(&mut self, length: usize) {
        // Nearly every word is shorter than 100 bytes.
        let digit = |value: usize| b"0123456789"[value % 10];
        if length < 10 {
            self.buffer.extend_from_slice(&[b'$', digit(length), b'\r', b'\n']);
        } else if length < 100 {
            self.buffer.extend_from_slice(&[b'$', digit(length / 10), digit(length), b'\r', b'\n']);
        } else {
            self.buffer.push(b'$');
            self.buffer.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
            self.buffer.extend_from_slice(b"\r\n");
        }
    }

    /// Writes the header, and says where the command starts in the buffer.
    #[inline]
    pub(crate) fn finish(self) -> usize {
        let mut digits = itoa::Buffer::new();
        let digits = digits.format(self.words).as_bytes();
        let start = HEADER_ROOM - digits.len() - 3;
        self.buffer[start] = b'*';
        self.buffer[start + 1..HEADER_ROOM - 2].copy_from_slice(digits);
        self.buffer[HEADER_ROOM - 2..HEADER_ROOM].copy_from_slice(b"\r\n");
        start
    }
}

/// Appends one command.
pub(crate) fn append(out: &mut Vec<u8>, words: &[&[u8]]) {
    out.push(b'*');
    out.extend_from_slice(itoa::Buffer::new().format(words.len()).as_bytes());
    out.extend_from_slice(b"\r\n");
    for word in words {
        append_word(out, word);
    }
}

/// Appends one word of a command.
pub(crate) fn append_word(out: &mut Vec<u8>, word: &[u8]) {
    out.push(b'$');
    out.extend_from_slice(itoa::Buffer::new().format(word.len()).as_bytes());
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(word);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(write: impl FnOnce(&mut Encoder<'_>)) -> String {
        let mut buffer = b"left over".to_vec();
        let mut encoder = Encoder::new(&mut buffer);
        write(&mut encoder);
        let start = encoder.finish();
        String::from_utf8(buffer[start..].to_vec()).expect("text")
    }

    #[test]
    fn words_parts_and_integers() {
        let text = encoded(|command| {
            command.word(b"SET").parts(&[b"rl:", b"{a}"]).integer(-15).word(b"");
        });
        assert_eq!(text, "*4\r\n$3\r\nSET\r\n$6\r\nrl:{a}\r\n$3\r\n-15\r\n$0\r\n\r\n");
    }

    #[test]
    fn every_length_of_word_and_command() {
        for length in [0, 1, 9, 10, 11, 99, 100, 101, 1234] {
            let word = "x".repeat(length);
            let text = encoded(|command| {
                command.words(std::iter::repeat_n(word.as_bytes(), length));
            });
            let mut twin = Vec::new();
            append(&mut twin, &vec![word.as_bytes(); length]);
            assert_eq!(text.as_bytes(), twin);
        }
    }
}
