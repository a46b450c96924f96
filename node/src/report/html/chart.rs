//! One chart as inline SVG.

use std::io::{self, Write};

use super::escape;

/// Points of a line at most: more than one for two pixels cannot be seen.
pub(super) const MAX_POINTS: usize = 400;

/// Lines of a chart at most: eight colours times four kinds of dashes.
pub(super) const MAX_LINES: usize = COLOURS * DASHES;

/// Colours of the style sheet, after the palette of Okabe and Ito for all kinds of colour vision. Their lightness
/// is shifted to be seen on white and on black; yellow is olive on white.
const COLOURS: usize = 8;

/// Kinds of dashes of the style sheet.
const DASHES: usize = 4;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;

/// Room for the labels: left, right, top, bottom.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 42.0;

/// Decades of a logarithmic axis in seconds: a microsecond to eleven days.
const DECADES: std::ops::RangeInclusive<i32> = -6..=6;

/// Marks of a linear axis, beside the one at zero.
const MARKS: u32 = 5;

/// One axis: where its values lie, and its marks.
pub(super) struct Axis {
    label: &'static str,
    scale: Scale,
    marks: Vec<(f64, String)>,
}

enum Scale {
    Linear { high: f64 },
    Log { low: f64, high: f64 },
}

impl Axis {
    /// From zero to `max` or a little more, with round marks.
    pub(super) fn linear(label: &'static str, max: f64) -> Self {
        let (step, decimals) = round_step(max / f64::from(MARKS));
        let mut high = 0.0;
        let mut marks = vec![(0.0, "0".to_owned())];
        for mark in 1..=MARKS {
            if high < max || mark == 1 {
                high = step * f64::from(mark);
                marks.push((high, format!("{high:.decimals$}")));
            }
        }
        Self {
            label,
            scale: Scale::Linear { high },
            marks,
        }
    }

    /// Whole decades around `low` and `high`, a mark each; also at 2 and 5 where decades are few.
    pub(super) fn log(label: &'static str, low: f64, high: f64) -> Self {
        let (first, last) = (*DECADES.start(), *DECADES.end());
        let below = |decade: &i32| 10f64.powi(*decade) <= low;
        let above = |decade: &i32| 10f64.powi(*decade) >= high;
        let from = (first..last).rev().find(below).unwrap_or(first);
        let to = (from + 1..=last).find(above).unwrap_or(last);
        let between: &[f64] = if to - from <= 2 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        let marks = (from..=to)
            .flat_map(|decade| between.iter().map(move |factor| (decade, *factor)))
            .filter(|(decade, factor)| *decade < to || *factor == 1.0)
            .map(|(decade, factor)| {
                let value = factor * 10f64.powi(decade);
                let decimals = usize::try_from(-decade).unwrap_or(0);
                (value, format!("{value:.decimals$}"))
            })
            .collect();
        Self {
            label,
            scale: Scale::Log {
                low: 10f64.powi(from),
                high: 10f64.powi(to),
            },
            marks,
        }
    }

    /// Where a value lies, 0 to 1. What lies outside is drawn at the edge.
    fn place(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear { high } => value / high,
            Scale::Log { low, high } => {
                (value.clamp(low, high) / low).log10() / (high / low).log10()
            }
        };
        place.clamp(0.0, 1.0)
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `least`, and the places behind its point.
fn round_step(least: f64) -> (f64, usize) {
    (-6..=15)
        .flat_map(|decade| [1.0, 2.0, 5.0].map(|factor| (factor, decade)))
        .map(|(factor, decade)| {
            let decimals = usize::try_from(-decade).unwrap_or(0);
            (factor * 10f64.powi(decade), decimals)
        })
        .find(|(step, _)| least > 0.0 && *step >= least * (1.0 - 1e-9))
        .unwrap_or((1.0, 0))
}

/// One line: a case or a node. Without points it only keeps its colour.
pub(super) struct Line {
    /// What it is called.
    pub(super) label: String,
    /// At most [`MAX_POINTS`].
    pub(super) points: Vec<(f64, f64)>,
}

/// A chart with its legend.
pub(super) struct Chart {
    /// Above it.
    pub(super) title: String,
    /// Below it.
    pub(super) x: Axis,
    /// Left of it.
    pub(super) y: Axis,
    /// In the order of their colours.
    pub(super) lines: Vec<Line>,
}

impl Chart {
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let title = escape(&self.title);
        writeln!(out, "<figure>\n<figcaption>{title}</figcaption>")?;
        writeln!(
            out,
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">"
        )?;
        self.write_axes(out)?;
        let drawn = || self.lines.iter().take(MAX_LINES).enumerate();
        for (number, line) in drawn().filter(|(_, line)| !line.points.is_empty()) {
            writeln!(
                out,
                "<path class=\"{}\" d=\"{}\"><title>{}</title></path>",
                class(number),
                self.path(&line.points),
                escape(&line.label)
            )?;
        }
        writeln!(out, "</svg>\n<ul class=\"legend\">")?;
        for (number, line) in drawn().filter(|(_, line)| !line.points.is_empty()) {
            writeln!(
                out,
                "<li><svg class=\"swatch\" viewBox=\"0 0 32 10\" aria-hidden=\"true\">\
                 <path class=\"{}\" d=\"M0 5H32\"/></svg> {}</li>",
                class(number),
                escape(&line.label)
            )?;
        }
        writeln!(out, "</ul>\n</figure>")
    }

    fn write_axes(&self, out: &mut impl Write) -> io::Result<()> {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, text) in &self.x.marks {
            let x = self.left(*value);
            writeln!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                bottom + 16.0
            )?;
        }
        for (value, text) in &self.y.marks {
            let y = self.top(*value);
            writeln!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                y + 4.0
            )?;
        }
        let (x, y) = (escape(self.x.label), escape(self.y.label));
        writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x}</text>\
             <text transform=\"translate(12 {}) rotate(-90)\" text-anchor=\"middle\">{y}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 8.0,
            f64::midpoint(TOP, bottom)
        )
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        let mut path = String::new();
        for (number, (x, y)) in points.iter().take(MAX_POINTS).enumerate() {
            let letter = if number == 0 { 'M' } else { 'L' };
            path.push_str(&format!("{letter}{:.1} {:.1}", self.left(*x), self.top(*y)));
        }
        path
    }

    fn left(&self, x: f64) -> f64 {
        LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT)
    }

    fn top(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - TOP - BOTTOM)
    }
}

/// The colour of a line, and dashes that change when the colours are used up.
fn class(number: usize) -> String {
    format!("line c{} d{}", number % COLOURS, number / COLOURS % DASHES)
}
