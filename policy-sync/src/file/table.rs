//! TOML values with their places: typed access that reports what is missing, unknown or of the wrong type.

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    problem::{Collector, Place, Refusal},
    words,
};
use crate::check::{nearest, quoted};

pub(super) type Value<'i> = Spanned<DeValue<'i>>;

/// What a table may hold.
pub(super) struct Shape {
    /// The fields.
    pub(super) fields: &'static [&'static str],
    /// Fields that people put here and that belong into a table inside, with the name of that table.
    pub(super) inside: &'static [(&'static str, &'static str)],
}

/// A table whose fields are known to be allowed there.
pub(super) struct Section<'a, 'i> {
    table: &'a DeTable<'i>,
    start: usize,
    place: Place,
    /// What the unknown fields were probably meant to be; those are not reported as missing too.
    meant: Vec<&'static str>,
}

/// One value and its place.
pub(super) struct Entry<'a, 'i> {
    pub(super) value: &'a Value<'i>,
    pub(super) place: Place,
}

impl<'a, 'i> Section<'a, 'i> {
    pub(super) fn new(
        table: &'a DeTable<'i>,
        start: usize,
        place: Place,
        shape: &Shape,
        problems: &mut Collector,
    ) -> Self {
        let mut section = Self { table, start, place, meant: Vec::new() };
        for key in table.keys().filter(|key| !shape.fields.contains(&key.get_ref().as_ref())) {
            let name = key.get_ref().as_ref();
            let place = section.place.key(name.to_owned());
            problems.report(key.span().start, place, section.unknown(name, shape));
        }
        section
    }

    /// A table of any fields.
    pub(super) fn open(table: &'a DeTable<'i>, entry: &Entry<'a, 'i>) -> Self {
        Self { table, start: entry.value.span().start, place: entry.place.clone(), meant: Vec::new() }
    }

    fn unknown(&mut self, name: &str, shape: &Shape) -> Refusal {
        if let Some((_, table)) = shape.inside.iter().find(|(field, _)| *field == name) {
            self.meant.push(table);
            return Refusal::new("unknown field").suggest(format!("it belongs into `{table} = {{ … }}`"));
        }
        match nearest(name, shape.fields.iter().copied()) {
            Some(field) => {
                self.meant.push(field);
                Refusal::new("unknown field").suggest(format!("did you mean `{field}`?"))
            }
            None => Refusal::new(format!("unknown field; known here are {}", shape.fields.join(", "))),
        }
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Whether an unknown field was probably meant to be this one.
    pub(super) fn is_meant(&self, name: &str) -> bool {
        self.meant.contains(&name)
    }

    pub(super) fn get(&self, name: &'static str) -> Option<Entry<'a, 'i>> {
        self.table.get(name).map(|value| Entry { value, place: self.place.key(name) })
    }

    pub(super) fn require(&self, name: &'static str, problems: &mut Collector) -> Option<Entry<'a, 'i>> {
        let entry = self.get(name);
        if entry.is_none() {
            let place = self.place.key(name);
            if self.is_meant(name) {
                problems.mark_refused(place);
            } else {
                problems.refuse(self.start, place, Refusal::new("is missing"));
            }
        }
        entry
    }

    /// All fields, for a table whose names are the user's.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a str, Entry<'a, 'i>)> {
        self.table.iter().map(|(key, value)| {
            let name = key.get_ref().as_ref();
            (name, Entry { value, place: self.place.key(name.to_owned()) })
        })
    }
}

impl<'a, 'i> Entry<'a, 'i> {
    pub(super) fn refuse(&self, refusal: Refusal, problems: &mut Collector) {
        problems.refuse(self.value.span().start, self.place.clone(), refusal);
    }

    /// The value of a result, or a problem here.
    pub(super) fn accept<T>(&self, result: Result<T, Refusal>, problems: &mut Collector) -> Option<T> {
        result.map_err(|refusal| self.refuse(refusal, problems)).ok()
    }

    /// The refusal for a value of another type.
    pub(super) fn unexpected(&self, expected: &str) -> Refusal {
        Refusal::new(format!("expected {expected}, found {}", described(self.value.get_ref())))
    }

    pub(super) fn table(&self) -> Option<&'a DeTable<'i>> {
        self.value.get_ref().as_table()
    }

    pub(super) fn section(&self, shape: &Shape, problems: &mut Collector) -> Option<Section<'a, 'i>> {
        let Some(table) = self.table() else {
            let fields = shape.fields.join(", ");
            self.refuse(self.unexpected(&format!("a table with {fields}")), problems);
            return None;
        };
        Some(Section::new(table, self.value.span().start, self.place.clone(), shape, problems))
    }

    pub(super) fn string(&self, problems: &mut Collector) -> Option<&'a str> {
        let text = self.value.get_ref().as_str();
        if text.is_none() {
            let refusal = match self.value.get_ref() {
                DeValue::Integer(number) => self.unexpected("a string").suggest(format!("write \"{number}\"")),
                _ => self.unexpected("a string"),
            };
            self.refuse(refusal, problems);
        }
        text
    }

    /// A string in one of the small languages.
    pub(super) fn parsed<T>(
        &self,
        parse: impl FnOnce(&str) -> Result<T, Refusal>,
        problems: &mut Collector,
    ) -> Option<T> {
        let text = self.string(problems)?;
        self.accept(parse(text), problems)
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(&self, words: &[(&'static str, T)], problems: &mut Collector) -> Option<T> {
        self.parsed(|text| words::one_of(text, words), problems)
    }

    /// A whole number. What is below 0 comes out as 0, and what does not fit as the largest: `check` knows the bounds.
    pub(super) fn number(&self, problems: &mut Collector) -> Option<u64> {
        let number = clamped_integer(self.value.get_ref());
        if number.is_none() {
            let refusal = self.unexpected("a whole number");
            let refusal = match self.value.get_ref() {
                DeValue::String(text) if text.parse::<u64>().is_ok() => refusal.suggest("remove the quotes"),
                _ => refusal,
            };
            self.refuse(refusal, problems);
        }
        number
    }

    /// As [`Self::number`], for the model's smaller numbers.
    pub(super) fn small_number(&self, problems: &mut Collector) -> Option<u32> {
        self.number(problems).map(|number| u32::try_from(number).unwrap_or(u32::MAX))
    }

    pub(super) fn boolean(&self, problems: &mut Collector) -> Option<bool> {
        let value = self.value.get_ref().as_bool();
        if value.is_none() {
            self.refuse(self.unexpected("true or false"), problems);
        }
        value
    }

    /// The elements of an array.
    pub(super) fn array(&self, of_what: &str, problems: &mut Collector) -> Option<Vec<Entry<'a, 'i>>> {
        let Some(array) = self.value.get_ref().as_array() else {
            let refusal = self.unexpected(&format!("an array of {of_what}"));
            let refusal = match self.value.get_ref() {
                DeValue::String(text) => refusal.suggest(format!("write [{}]", quoted(text))),
                _ => refusal,
            };
            self.refuse(refusal, problems);
            return None;
        };
        let entries = array.iter().enumerate();
        Some(entries.map(|(index, value)| Entry { value, place: self.place.index(index) }).collect())
    }

    /// An array of strings. An element that is none leaves an empty string, so that the others keep their positions.
    pub(super) fn strings(&self, problems: &mut Collector) -> Option<Vec<String>> {
        let entries = self.array("strings", problems)?;
        Some(entries.iter().map(|entry| entry.string(problems).unwrap_or_default().to_owned()).collect())
    }
}

/// An integer moved to the nearest `u64`; `None` for other types.
pub(super) fn clamped_integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    let text = integer.as_str();
    Some(match i128::from_str_radix(text, integer.radix()) {
        Ok(number) => u64::try_from(number.max(0)).unwrap_or(u64::MAX),
        Err(_) if text.starts_with('-') => 0,
        Err(_) => u64::MAX,
    })
}

/// A value as a message names what it found.
fn described(value: &DeValue<'_>) -> String {
    const CHARACTERS_MAX: usize = 64;
    let number = |text: &str| text.chars().take(CHARACTERS_MAX).collect::<String>();
    match value {
        DeValue::String(text) => format!("the string {}", quoted(text)),
        DeValue::Integer(integer) => format!("the number {}", number(&integer.to_string())),
        DeValue::Float(float) => format!("the number {}", number(float.as_str())),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(datetime) => format!("the time {datetime}"),
        DeValue::Array(_) => "an array".into(),
        DeValue::Table(_) => "a table".into(),
    }
}
