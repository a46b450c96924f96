//! Parsing of seeds, and who is contacted when.

use super::*;

fn address(port: u16) -> SocketAddr {
    ([10, 0, 0, 1], port).into()
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::since_start(Duration::from_secs(seconds))
}

fn book(seeds: &[u16]) -> SeedBook {
    let mut book = SeedBook::new(address(1), Timestamp::ZERO);
    let seeds: Vec<_> = seeds.iter().map(|port| address(*port)).collect();
    book.resolved(&seeds, &[]);
    book
}

fn live(ports: &[u16]) -> BTreeSet<SocketAddr> {
    ports.iter().map(|port| address(*port)).collect()
}

#[test]
fn addresses_and_names_are_seeds_and_read_back_the_same() {
    for text in [
        "10.0.0.7:7401",
        "[fd00::7]:7401",
        "shoal.example:7401",
        "shoal_gossip.default.svc.cluster.local.:1",
        "localhost:65535",
    ] {
        assert_eq!(text.parse::<Seed>().unwrap().to_string(), text);
    }
    let list: SeedList = " a:1, 10.0.0.7:2 ,a:1".parse().unwrap();
    assert_eq!(list.seeds().len(), 2);
    assert!("".parse::<SeedList>().unwrap().seeds().is_empty());
}

#[test]
fn garbage_is_refused_with_a_text_that_says_why() {
    for (text, why) in [
        ("", "no port"),
        ("shoal.example", "no port"),
        ("10.0.0.7", "no port"),
        ("fd00::7", "no port"),
        ("shoal.example:0", "1 to 65535"),
        ("shoal.example:70000", "1 to 65535"),
        ("shoal.example:port", "1 to 65535"),
        ("10.0.0.7:0", "port 0"),
        ("0.0.0.0:7401", "every interface"),
        ("10.0.0.300:7401", "neither"),
        ("http://shoal:7401", "neither"),
        ("sho al:7401", "neither"),
        (":7401", "neither"),
        ("a..b:7401", "neither"),
    ] {
        let error = text.parse::<Seed>().unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
        assert!(error.contains("host:port"), "{error}");
    }
    assert!("a:1,,b:2".parse::<SeedList>().is_err());
    let many: Vec<String> = (0..65).map(|n| format!("seed{n}:7401")).collect();
    let error = many.join(",").parse::<SeedList>().unwrap_err().to_string();
    assert!(error.contains("65 seeds, at most 64"), "{error}");
}

#[test]
fn a_node_alone_tries_every_seed_in_turn_and_never_itself() {
    let mut book = book(&[1, 2, 3, 4, 5, 6]);
    let mut tried = BTreeSet::new();
    for _ in 0..2 {
        let contacts = book.contacts();
        assert_eq!(contacts.len(), CONTACTS_ALONE);
        tried.extend(contacts);
    }
    assert_eq!(tried, live(&[2, 3, 4, 5, 6]));
    assert_eq!(
        book.state(),
        SeedState::Alone {
            since: Timestamp::ZERO,
            tried: 6,
            unresolved: vec![]
        }
    );
}

#[test]
fn a_node_without_anybody_to_try_says_so() {
    let mut book = book(&[1]);
    assert!(book.contacts().is_empty());
    book.resolved(&[], &["shoal.example:7401".to_owned()]);
    assert_eq!(
        book.state(),
        SeedState::Alone {
            since: Timestamp::ZERO,
            tried: 0,
            unresolved: vec!["shoal.example:7401".to_owned()]
        }
    );
}

#[test]
fn in_company_only_strangers_are_contacted_and_seldom() {
    let mut book = book(&[2, 3]);
    book.live(at(1), live(&[2, 9]));
    assert_eq!(book.state(), SeedState::Joined { peers: 2 });
    let contacts: Vec<_> = (0..8).map(|_| book.contacts()).collect();
    let (none, one) = (vec![], vec![address(3)]);
    assert_eq!(
        contacts,
        [&none, &none, &none, &one, &none, &none, &none, &one].map(Clone::clone)
    );
    book.live(at(2), live(&[2, 3, 9]));
    assert!((0..8).all(|_| book.contacts().is_empty()));
}

#[test]
fn lost_peers_are_tried_like_seeds_until_their_memory_ends() {
    let mut book = book(&[]);
    book.live(at(1), live(&[2, 3]));
    book.live(at(2), live(&[]));
    assert_eq!(book.contacts(), [address(2), address(3)]);
    assert!(matches!(
        book.state(),
        SeedState::Alone { since, tried: 2, .. } if since == at(2)
    ));
    book.live(at(3), live(&[3]));
    book.live(at(4), live(&[]));
    assert_eq!(book.contacts().len(), 2);
    book.live(at(2 + 3_600), live(&[]));
    assert_eq!(book.contacts(), [address(3)]);
}

#[test]
fn the_memory_of_lost_peers_is_bounded() {
    let mut book = book(&[]);
    for n in 0..200 {
        book.live(at(n), live(&[1_000 + n as u16]));
    }
    assert_eq!(book.lost.len(), MAX_LOST);
    assert!(book.lost.contains_key(&address(1_198)));
    assert!(!book.lost.contains_key(&address(1_000)));
}
