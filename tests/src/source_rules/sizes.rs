//! Limits on the tail: good code is small in the middle anyway, and rots where one file or function
//! grows for ever.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, ImplItemFn, Item, ItemFn, ItemImpl, ItemMod, Signature, TraitItemFn};

use crate::source_rules::Tree;

/// Lines of a file, tests not counted. Longer ones are split by state or phase.
const FILE_LINES: usize = 500;

/// Lines of a function, from its name to its end.
const FUNCTION_LINES: usize = 70;

/// Lines of a function named in [`LONG_FUNCTIONS`].
const LONG_FUNCTION_LINES: usize = 100;

/// Functions that may be longer since they are one table that reads best in one piece: path and name.
const LONG_FUNCTIONS: [(&str, &str); 0] = [];

/// Parameters of a function, `self` not counted. More go into a struct.
const PARAMETERS: usize = 5;

/// Files that are too long.
pub fn long_files(tree: &Tree) -> Vec<String> {
    let tests = test_files(tree);
    sources(tree, &tests)
        .filter_map(|(path, text, file)| {
            let lines = text.lines().count() - test_lines(&file.items);
            (lines > FILE_LINES)
                .then(|| format!("{path}: {lines} lines, at most {FILE_LINES} are allowed"))
        })
        .collect()
}

/// Functions that are too long.
pub fn long_functions(tree: &Tree) -> Vec<String> {
    functions(tree)
        .into_iter()
        .filter_map(|(path, function)| {
            let named = LONG_FUNCTIONS.contains(&(path, function.name.as_str()));
            let limit = if named {
                LONG_FUNCTION_LINES
            } else {
                FUNCTION_LINES
            };
            (function.lines > limit).then(|| {
                format!(
                    "{path}: {} has {} lines, at most {limit} are allowed",
                    function.name, function.lines
                )
            })
        })
        .collect()
}

/// Functions with too many parameters. Methods of a trait of somebody else's have what the trait says.
pub fn wide_functions(tree: &Tree) -> Vec<String> {
    functions(tree)
        .into_iter()
        .filter(|(_, function)| function.parameters > PARAMETERS)
        .map(|(path, function)| {
            format!(
                "{path}: {} takes {} parameters, at most {PARAMETERS} are allowed",
                function.name, function.parameters
            )
        })
        .collect()
}

/// Modules called `mod.rs`: all editors' tabs would look the same.
pub fn mod_files(tree: &Tree) -> Vec<String> {
    tree.ending(&["/mod.rs"])
        .map(|(path, _)| format!("{path}: modules are named `folder.rs` beside `folder/`"))
        .collect()
}

/// Rust files that are not tests, parsed. One that cannot be parsed is rustc's to complain about.
fn sources<'a, 'b>(
    tree: &'a Tree,
    tests: &'b BTreeSet<String>,
) -> impl Iterator<Item = (&'a str, &'a str, syn::File)> + use<'a, 'b> {
    tree.ending(&[".rs"])
        .filter(|(path, _)| !tests.contains(*path))
        .filter_map(|(path, text)| Some((path, text, syn::parse_file(text).ok()?)))
}

/// Every function that is no test, with the file it is in.
fn functions(tree: &Tree) -> Vec<(&str, Function)> {
    let tests = test_files(tree);
    sources(tree, &tests)
        .flat_map(|(path, _, file)| {
            let mut finder = Finder::default();
            finder.visit_file(&file);
            finder
                .found
                .into_iter()
                .map(move |function| (path, function))
        })
        .collect()
}

/// Files that hold tests only: integration tests, scenarios, and modules declared under `cfg(test)`.
fn test_files(tree: &Tree) -> BTreeSet<String> {
    let mut tests: BTreeSet<String> = tree
        .ending(&[".rs"])
        .map(|(path, _)| path)
        .filter(|path| path.starts_with("tests/scenarios/") || path.contains("/tests/"))
        .map(str::to_owned)
        .collect();
    for (path, text) in tree.ending(&[".rs"]) {
        let Ok(file) = syn::parse_file(text) else {
            continue;
        };
        let whole = path.trim_end_matches(".rs");
        let folder = match whole.rsplit_once('/') {
            Some((folder, "lib" | "main")) => folder,
            _ => whole,
        };
        for item in &file.items {
            if let Item::Mod(module) = item
                && module.content.is_none()
                && is_test(&module.attrs)
            {
                tests.insert(format!("{folder}/{}.rs", module.ident));
            }
        }
    }
    tests
}

/// Lines of the items that only tests see.
fn test_lines(items: &[Item]) -> usize {
    items
        .iter()
        .map(|item| match item {
            Item::Mod(module) if is_test(&module.attrs) => lines(module.span()),
            Item::Mod(ItemMod {
                content: Some((_, inner)),
                ..
            }) => test_lines(inner),
            _ => 0,
        })
        .sum()
}

fn lines(span: proc_macro2::Span) -> usize {
    span.end().line - span.start().line + 1
}

/// `#[cfg(test)]` or `#[test]`, also under another name such as `tokio::test`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let cfg_test = attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|path| path.is_ident("test"));
        let last = attribute.path().segments.last();
        cfg_test || last.is_some_and(|segment| segment.ident == "test")
    })
}

struct Function {
    name: String,
    lines: usize,
    parameters: usize,
}

/// Collects functions and leaves tests out.
#[derive(Default)]
struct Finder {
    found: Vec<Function>,
    in_trait_impl: bool,
}

impl Finder {
    fn add(&mut self, signature: &Signature, body: &Block) {
        let start = signature.fn_token.span.start().line;
        let own = signature
            .inputs
            .iter()
            .filter(|input| matches!(input, syn::FnArg::Typed(_)))
            .count();
        self.found.push(Function {
            name: signature.ident.to_string(),
            lines: body.span().end().line - start + 1,
            parameters: if self.in_trait_impl { 0 } else { own },
        });
    }
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_impl(&mut self, block: &'ast ItemImpl) {
        if is_test(&block.attrs) {
            return;
        }
        let outer = std::mem::replace(&mut self.in_trait_impl, block.trait_.is_some());
        visit::visit_item_impl(self, block);
        self.in_trait_impl = outer;
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        if !is_test(&function.attrs) {
            self.add(&function.sig, &function.block);
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_test(&function.attrs) {
            self.add(&function.sig, &function.block);
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        if let Some(body) = &function.default {
            self.add(&function.sig, body);
        }
        visit::visit_trait_item_fn(self, function);
    }
}
