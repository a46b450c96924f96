//! The few distributions that a workload needs. Their formulas are in the open literature, named at each.

use std::f64::consts::{SQRT_2, TAU};

use rand::RngExt;
use rand::rngs::StdRng;

/// Uniform in (0, 1]: safe to take the logarithm of.
fn positive_unit(rng: &mut StdRng) -> f64 {
    1.0 - rng.random::<f64>()
}

/// Exponential with mean 1, by inversion.
pub(super) fn exponential(rng: &mut StdRng) -> f64 {
    -positive_unit(rng).ln()
}

/// Two independent standard normals (Box and Muller, "A note on the generation of random normal deviates", 1958).
///
/// Always two draws of the generator, so every request takes as much of it as any other.
pub(super) fn normals(rng: &mut StdRng) -> (f64, f64) {
    let radius = (-2.0 * positive_unit(rng).ln()).sqrt();
    let (sin, cos) = (TAU * rng.random::<f64>()).sin_cos();
    (radius * cos, radius * sin)
}

/// Share of a standard normal below `x`, within 1e-7.
///
/// Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26 for the error function.
pub(super) fn normal_cdf(x: f64) -> f64 {
    const TERMS: [f64; 5] = [
        1.061_405_429,
        -1.453_152_027,
        1.421_413_741,
        -0.284_496_736,
        0.254_829_592,
    ];
    let z = x.abs() / SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let polynomial = TERMS.iter().fold(0.0, |sum, term| (sum + term) * t);
    let above = 0.5 * polynomial * (-z * z).exp();
    if x < 0.0 { above } else { 1.0 - above }
}

/// Gamma with this shape and scale 1, so with mean and variance `shape`, which must be positive.
///
/// Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26(3), 2000; below a shape of 1
/// their boost by a power of a uniform. A rejection happens in under 5 % of rounds at any shape.
pub(super) fn gamma(shape: f64, rng: &mut StdRng) -> f64 {
    if shape < 1.0 {
        let boost = positive_unit(rng).powf(1.0 / shape);
        return gamma(shape + 1.0, rng) * boost;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let (x, _) = normals(rng);
        let v = (1.0 + c * x).powi(3);
        let accepted = v > 0.0 && positive_unit(rng).ln() < 0.5 * x * x + d - d * v + d * v.ln();
        if accepted {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    const DRAWS: u32 = 100_000;

    /// Mean and variance of many draws.
    fn moments(mut draw: impl FnMut(&mut StdRng) -> f64) -> (f64, f64) {
        let mut rng = StdRng::seed_from_u64(11);
        let count = f64::from(DRAWS);
        let draws: Vec<f64> = (0..DRAWS).map(|_| draw(&mut rng)).collect();
        let mean = draws.iter().sum::<f64>() / count;
        let squares: f64 = draws.iter().map(|draw| (draw - mean).powi(2)).sum();
        (mean, squares / count)
    }

    fn near(found: f64, expected: f64, tolerance: f64) {
        assert!(
            (found - expected).abs() < tolerance,
            "{found} instead of {expected}"
        );
    }

    #[test]
    fn an_exponential_has_mean_and_variance_one() {
        let (mean, variance) = moments(exponential);
        near(mean, 1.0, 0.02);
        near(variance, 1.0, 0.04);
    }

    #[test]
    fn both_normals_are_standard_and_independent() {
        for pick in [|pair: (f64, f64)| pair.0, |pair: (f64, f64)| pair.1] {
            let (mean, variance) = moments(|rng| pick(normals(rng)));
            near(mean, 0.0, 0.02);
            near(variance, 1.0, 0.03);
        }
        let (product, _) = moments(|rng| {
            let (one, other) = normals(rng);
            one * other
        });
        near(product, 0.0, 0.02);
    }

    #[test]
    fn the_normal_distribution_function_meets_its_table() {
        for (x, share) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746),
            (-1.0, 0.158_655_254),
            (1.959_963_985, 0.975),
            (-3.0, 0.001_349_898),
            (9.0, 1.0),
        ] {
            near(normal_cdf(x), share, 1.5e-7);
        }
    }

    #[test]
    fn a_gamma_has_its_shape_as_mean_and_as_variance() {
        for shape in [0.0625, 0.25, 0.9, 1.0, 4.0, 10_000.0] {
            let (mean, variance) = moments(|rng| gamma(shape, rng));
            near(mean / shape, 1.0, 0.04);
            near(variance / shape, 1.0, 0.1);
        }
    }
}
