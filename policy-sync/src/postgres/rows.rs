//! What a query gave: columns, and rows of texts.
//!
//! All texts stand in one buffer, and each cell is the place where it ends, so a result of a hundred thousand rows is
//! three allocations and not a million.

use std::fmt;

use super::{
    error::{Error, TooLarge},
    limits::{CELL_BYTES, Limits},
};

/// A column of a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// Its type, as PostgreSQL numbers them (`pg_type.oid`).
    pub type_oid: u32,
}

/// The result of one query.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Rows {
    columns: Vec<Column>,
    texts: String,
    /// Of each cell where its text ends, shifted by one, and the lowest bit set for NULL.
    ends: Vec<u32>,
    len: usize,
    tag: String,
}

/// One row of a result.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    rows: &'a Rows,
    /// Its first cell.
    first: usize,
}

/// The rows of a result, in the order in which they came.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    rows: &'a Rows,
    next: usize,
}

impl Rows {
    /// A result that has these columns and no rows yet.
    pub(crate) fn with_columns(columns: Vec<Column>) -> Self {
        Self { columns, ..Self::default() }
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The columns; none where the statement gives no rows at all.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// What the server says it did, such as `SELECT 3` or `UPDATE 1`; empty for an empty query.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// How many rows the statement gave or touched, from the tag; 0 where the tag has no number.
    pub fn affected(&self) -> u64 {
        self.tag.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    /// A row, counted from 0.
    pub fn get(&self, row: usize) -> Option<Row<'_>> {
        (row < self.len).then(|| Row { rows: self, first: row * self.columns.len() })
    }

    /// All rows.
    pub fn iter(&self) -> Iter<'_> {
        Iter { rows: self, next: 0 }
    }

    pub(crate) fn set_tag(&mut self, tag: &str) {
        tag.clone_into(&mut self.tag);
    }

    /// Bytes that count against [`Limits::result_bytes_max`].
    fn bytes(&self) -> usize {
        self.texts.len() + self.ends.len() * CELL_BYTES
    }

    /// Makes room for a row of so many bytes and cells, or says why there is none.
    pub(crate) fn admit(&self, text_bytes: usize, limits: &Limits) -> Result<(), Error> {
        if self.len >= limits.rows_max {
            return Err(Error::TooLarge(TooLarge::Rows { max: limits.rows_max }));
        }
        if self.bytes() + text_bytes + self.columns.len() * CELL_BYTES > limits.result_bytes_max {
            return Err(Error::TooLarge(TooLarge::ResultBytes { max: limits.result_bytes_max }));
        }
        Ok(())
    }

    /// Appends a cell of the row that is being read.
    pub(crate) fn push_cell(&mut self, text: Option<&str>) {
        self.texts.push_str(text.unwrap_or_default());
        let end = u32::try_from(self.texts.len()).unwrap_or(u32::MAX >> 1);
        self.ends.push(end << 1 | u32::from(text.is_none()));
    }

    /// The cells that were appended are a row.
    pub(crate) fn end_row(&mut self) {
        self.len += 1;
    }

    fn cell(&self, cell: usize) -> Option<&str> {
        let end = *self.ends.get(cell)?;
        if end & 1 == 1 {
            return None;
        }
        let start = if cell == 0 { 0 } else { self.ends.get(cell - 1)? >> 1 };
        self.texts.get(start as usize..(end >> 1) as usize)
    }
}

impl<'a> Row<'a> {
    /// The value of a column, counted from 0; `None` for NULL, and where there is no such column.
    pub fn get(&self, column: usize) -> Option<&'a str> {
        if column < self.rows.columns.len() { self.rows.cell(self.first + column) } else { None }
    }

    /// The value of the column of this name.
    pub fn by_name(&self, name: &str) -> Option<&'a str> {
        self.get(self.rows.columns.iter().position(|column| column.name == name)?)
    }

    /// How many columns there are.
    pub fn len(&self) -> usize {
        self.rows.columns.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.columns.is_empty()
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = Row<'a>;

    fn next(&mut self) -> Option<Row<'a>> {
        let row = self.rows.get(self.next)?;
        self.next += 1;
        Some(row)
    }
}

impl<'a> IntoIterator for &'a Rows {
    type IntoIter = Iter<'a>;
    type Item = Row<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl fmt::Debug for Row<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries((0..self.len()).map(|column| self.get(column))).finish()
    }
}

/// Says how large it is and not what is in it: a policy may be large, and identities may be nobody's business.
impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.columns.iter().map(|column| column.name.as_str()).collect();
        f.debug_struct("Rows").field("columns", &names).field("rows", &self.len).field("tag", &self.tag).finish()
    }
}
