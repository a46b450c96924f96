use super::*;

const WANTED: [&str; 3] = ["load", "vllm:load", "info"];

fn sum(text: &str) -> Option<f64> {
    Samples::of(text, &WANTED).sum("load")
}

#[track_caller]
fn label(line: &str, name: &str, expected: Option<&str>) {
    let samples = Samples::of(line, &WANTED);
    assert_eq!(samples.label("info", name).as_deref(), expected, "{line}");
}

#[test]
fn sums_and_maxima_run_over_all_label_sets() {
    let text = "load{engine=\"0\"} 3\nload{engine=\"1\"} 4.5\nvllm:load 9\n";
    let samples = Samples::of(text, &WANTED);
    assert_eq!(samples.sum("load"), Some(7.5));
    assert_eq!(samples.max("load"), Some(4.5));
    assert_eq!(samples.sum("vllm:load"), Some(9.0));
    assert_eq!(samples.sum("info"), None);
    assert!(samples.has("load") && !samples.has("info"));
}

#[test]
fn a_value_that_is_no_count_makes_the_series_unknown() {
    for bad in ["NaN", "+Inf", "-Inf", "-1", "", "x", "1,5", "--2"] {
        assert_eq!(
            sum(&format!("load{{a=\"0\"}} 1\nload{{a=\"1\"}} {bad}\n")),
            None,
            "{bad}"
        );
        assert_eq!(sum(&format!("load {bad}\nload 1\n")), None, "{bad}");
    }
    assert_eq!(sum("load 1e308\nload 1e308\n"), None);
    assert_eq!(sum("load 1.7959629127e+09"), Some(1.795_962_912_7e9));
}

#[test]
fn a_line_that_is_cut_off_makes_the_series_unknown() {
    for cut in [
        "load",
        "load{",
        "load{a=\"0",
        "load{a=\"0\"}",
        "load{a=\"}\" 1",
    ] {
        assert_eq!(sum(&format!("load{{a=\"1\"}} 1\n{cut}")), None, "{cut}");
    }
}

#[test]
fn comments_junk_and_longer_names_are_skipped() {
    let text = "# HELP load Is 9.\r\n# TYPE load gauge\r\n<html>\r\n\r\nload_total 7\r\nx:load 7\r\n\
                load! 7\r\n  load\t2 1395066363000\r\nload{} 3 # {id=\"1\"} 8\r\n\u{fffd}";
    assert_eq!(sum(text), Some(5.0));
}

#[test]
fn label_values_are_found_behind_others_and_unescaped() {
    label(r#"info{a="1",size="364"} 1.0"#, "size", Some("364"));
    label(r#"info{ a = "1" , size = "364" , } 1"#, "size", Some("364"));
    label(
        r#"info{a="x} 7",b="",c="size=\"2\"",size="3"} 1"#,
        "size",
        Some("3"),
    );
    label(
        r#"info{name="a\\b\"c\nd\te"} 1"#,
        "name",
        Some("a\\b\"c\nd\\te"),
    );
    label(r#"info{name="ü{€}"} 1"#, "name", Some("ü{€}"));
    label(r#"info{resized="1"} 1"#, "size", None);
    label(r#"info{size=1} 1"#, "size", None);
    label("info 1", "size", None);
    label(r#"info{size="1"#, "size", None);
}

#[test]
fn a_text_without_end_tells_nothing() {
    let text = "load{engine=\"0\"} 1\n".repeat(MAX_KEPT + 1);
    assert_eq!(sum(&text), None);
    assert_eq!(
        sum(&text[..text.len() / (MAX_KEPT + 1) * MAX_KEPT]),
        Some(4096.0)
    );
}

proptest::proptest! {
    #[test]
    fn any_text_is_read_without_panic(text in "(load|info|[{}\"\\\\=, \n\r#a1é-]){0,80}") {
        let samples = Samples::of(&text, &WANTED);
        for sample in samples.each("info") {
            assert!(sample.value().is_none_or(f64::is_finite));
            sample.label("a");
        }
        samples.sum("load");
    }
}
