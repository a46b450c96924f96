//! What goes wrong in a simulated mesh, and when.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Something that happens to a mesh at a moment of its virtual time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// When, from the start.
    pub at: Duration,
    /// What.
    pub what: FaultKind,
}

/// What happens. Nodes are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultKind {
    /// A node's process is gone from one moment to the next.
    Kill(usize),
    /// A node begins a new, empty life. One whose first fault this is was not there before.
    Join(usize),
    /// A node takes no new work, and ends what it has.
    Drain(usize),
    /// A node's steps take so many times as long from now on; 1 ends it.
    Slow(usize, f64),
    /// The first so many nodes and the others do not hear each other any more.
    Cut(usize),
    /// They do again.
    Heal,
}

impl FaultKind {
    /// The node it happens to, if it is one.
    pub fn node(self) -> Option<usize> {
        match self {
            Self::Kill(node) | Self::Join(node) | Self::Drain(node) | Self::Slow(node, _) => {
                Some(node)
            }
            Self::Cut(_) | Self::Heal => None,
        }
    }
}

/// A fault was written in another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write SECONDS:kill:NODE, SECONDS:join:NODE, SECONDS:drain:NODE, SECONDS:slow:NODE:TIMES, SECONDS:cut:NODES or SECONDS:heal, \
     with nodes counted from 0"
)]
pub struct NoFault;

impl FromStr for Fault {
    type Err = NoFault;

    fn from_str(text: &str) -> Result<Self, NoFault> {
        let number = |text: &str| text.parse::<usize>().map_err(|_| NoFault);
        let positive = |text: &str| match text.parse::<f64>() {
            Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
            Ok(_) | Err(_) => Err(NoFault),
        };
        let mut parts = text.split(':');
        let at = parts.next().and_then(|at| at.parse::<f64>().ok());
        let at = at.and_then(|at| Duration::try_from_secs_f64(at).ok());
        let parts: Vec<&str> = parts.collect();
        let what = match parts.as_slice() {
            ["kill", node] => FaultKind::Kill(number(node)?),
            ["join", node] => FaultKind::Join(number(node)?),
            ["drain", node] => FaultKind::Drain(number(node)?),
            ["slow", node, times] => FaultKind::Slow(number(node)?, positive(times)?),
            ["cut", nodes] => FaultKind::Cut(number(nodes)?),
            ["heal"] => FaultKind::Heal,
            _ => return Err(NoFault),
        };
        Ok(Self {
            at: at.ok_or(NoFault)?,
            what,
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.at.as_secs_f64())?;
        match self.what {
            FaultKind::Kill(node) => write!(f, "kill:{node}"),
            FaultKind::Join(node) => write!(f, "join:{node}"),
            FaultKind::Drain(node) => write!(f, "drain:{node}"),
            FaultKind::Slow(node, times) => write!(f, "slow:{node}:{times}"),
            FaultKind::Cut(nodes) => write!(f, "cut:{nodes}"),
            FaultKind::Heal => f.write_str("heal"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_written() {
        for text in [
            "60:kill:3",
            "0.5:join:0",
            "1:drain:2",
            "2:slow:1:2.5",
            "3:cut:8",
            "4:heal",
        ] {
            let fault: Fault = text.parse().expect(text);
            assert_eq!(fault.to_string(), text);
        }
        let slow: Fault = "2:slow:1:2.5".parse().expect("a fault");
        assert_eq!(slow.at, Duration::from_secs(2));
        assert_eq!(slow.what, FaultKind::Slow(1, 2.5));
    }

    #[test]
    fn anything_else_is_no_fault() {
        for text in [
            "",
            "60",
            "kill:3",
            "60:kill",
            "60:kill:x",
            "-1:kill:3",
            "nan:kill:3",
            "1:slow:2",
            "1:slow:2:0",
            "1:slow:2:nan",
            "1:heal:3",
            "1:burn:3",
            "1:kill:-3",
        ] {
            assert_eq!(text.parse::<Fault>(), Err(NoFault), "{text}");
        }
    }
}
