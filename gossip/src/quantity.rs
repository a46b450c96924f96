//! Quantities with their unit in the type, and the only conversions between them.

use std::fmt;
use std::iter::Sum;
use std::num::NonZeroU32;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl $name {
            /// Nothing.
            pub const ZERO: Self = Self(0);
        }

        // Saturating on purpose: these numbers come from peers, and a lie must not end a process.
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                items.fold(Self::ZERO, Add::add)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

quantity! {
    /// A number of tokens. Sums saturate.
    Tokens(u32)
}
quantity! {
    /// A number of KV blocks of one node's block size. Sums saturate, differences stop at zero.
    Blocks(u32)
}
quantity! {
    /// A number of bytes. Sums saturate.
    ByteCount(u64)
}

/// Tokens held by one KV block. The only way from [`Tokens`] to [`Blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// vLLM's default for GPUs, and ours.
    pub const DEFAULT: Self = Self(NonZeroU32::MIN.saturating_add(15));

    /// A block of `tokens` tokens.
    pub fn new(tokens: NonZeroU32) -> Self {
        Self(tokens)
    }

    /// Tokens in one block.
    pub fn tokens(self) -> NonZeroU32 {
        self.0
    }

    /// Blocks that hold `tokens`; a partial block costs a whole one.
    pub fn blocks_for(self, tokens: Tokens) -> Blocks {
        Blocks(tokens.0.div_ceil(self.0.get()))
    }

    /// Tokens that fit in `blocks`.
    pub fn tokens_in(self, blocks: Blocks) -> Tokens {
        Tokens(blocks.0.saturating_mul(self.0.get()))
    }
}

impl Default for BlockSize {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_block_still_costs_a_whole_block() {
        let size = BlockSize::DEFAULT;
        assert_eq!(size.tokens().get(), 16);
        assert_eq!(size.blocks_for(Tokens(0)), Blocks(0));
        assert_eq!(size.blocks_for(Tokens(16)), Blocks(1));
        assert_eq!(size.blocks_for(Tokens(17)), Blocks(2));
        assert_eq!(size.tokens_in(Blocks(2)), Tokens(32));
    }

    #[test]
    fn sums_of_hostile_numbers_saturate() {
        assert_eq!(Blocks(u32::MAX) + Blocks(1), Blocks(u32::MAX));
        assert_eq!(Blocks(1) - Blocks(2), Blocks::ZERO);
        assert_eq!(
            [Tokens(u32::MAX), Tokens(9)].into_iter().sum::<Tokens>(),
            Tokens(u32::MAX)
        );
    }
}
