//! The names that a question's name may be short for, and those it may be an expansion of.

use std::sync::Arc;

/// More than Kubernetes allows in a pod's `dnsConfig`.
const MOST_DOMAINS: usize = 32;

/// The domains that a pod's resolver tries names in, in order.
///
/// A name that is not of the cluster's domain arrives once for each of them before it arrives as the application wrote
/// it, as long as it has fewer dots than `ndots` (5 in Kubernetes). Each is an expansion that the mesh can see through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchPath(Vec<Arc<str>>);

impl SearchPath {
    /// What Kubernetes gives to a pod of `namespace`.
    pub fn of_cluster(namespace: &str, domain: &str) -> Self {
        let names = [format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.into()];
        Self(names.into_iter().map(Arc::from).collect())
    }

    /// What a `resolv.conf` says (resolv.conf(5)). `None` if it names no domain to search.
    pub fn parse(resolv_conf: &str) -> Option<Self> {
        // The last of them counts.
        let line = resolv_conf.lines().rev().find_map(|line| {
            let mut words = line.split_ascii_whitespace();
            matches!(words.next(), Some("search" | "domain")).then_some(words)
        })?;
        let domains = line.map(|domain| domain.trim_end_matches('.').to_ascii_lowercase());
        let domains = domains.filter(|domain| !domain.is_empty());
        let domains: Vec<_> = domains.take(MOST_DOMAINS).map(Arc::from).collect();
        (!domains.is_empty()).then_some(Self(domains))
    }
}

/// A name to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Alias {
    /// The name.
    pub(super) name: String,
    /// What was left of the question's name when a search domain was taken off.
    pub(super) stripped: Option<String>,
}

/// All names to look for, the likeliest first.
pub(super) fn expand(name: &str, namespace: &str, domain: &str, search: &SearchPath) -> Vec<Alias> {
    let mut aliases = Vec::new();
    let mut add = |name: &str, stripped: Option<&str>| {
        let names = std::iter::once(name.to_owned()).chain(of_cluster(name, namespace, domain));
        aliases.extend(names.map(|name| Alias { name, stripped: stripped.map(ToOwned::to_owned) }));
    };
    add(name, None);
    for searched in &search.0 {
        let before = name.strip_suffix(&**searched).and_then(|rest| rest.strip_suffix('.'));
        if let Some(stripped) = before.filter(|stripped| !stripped.is_empty()) {
            add(stripped, Some(stripped));
        }
    }
    aliases
}

/// What `name` stands for in the cluster, if it is short for a name there.
fn of_cluster(name: &str, namespace: &str, domain: &str) -> Vec<String> {
    let labels: Vec<&str> = name.split('.').collect();
    match *labels {
        [_] => vec![format!("{name}.{namespace}.svc.{domain}")],
        [_, _] => {
            vec![format!("{name}.svc.{domain}"), format!("{name}.{namespace}.svc.{domain}")]
        }
        [_, _, "svc"] | [_, _, _, "svc"] => vec![format!("{name}.{domain}")],
        [_, _, _] => vec![format!("{name}.svc.{domain}")],
        _ => Vec::new(),
    }
}

/// The wildcards that cover `name`, the narrowest first: `*.b.c` and `*.c` of `a.b.c`.
pub(super) fn wildcards(name: &str) -> impl Iterator<Item = String> {
    let mut rest = name;
    std::iter::from_fn(move || {
        (_, rest) = rest.split_once('.')?;
        Some(format!("*.{rest}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(name: &str) -> Vec<(String, Option<String>)> {
        let search = SearchPath::of_cluster("shop", "c.local");
        let aliases = expand(name, "shop", "c.local", &search);
        aliases.into_iter().map(|alias| (alias.name, alias.stripped)).collect()
    }

    #[track_caller]
    fn check(name: &str, want: &[(&str, Option<&str>)]) {
        let want: Vec<_> =
            want.iter().map(|(n, s)| ((*n).to_owned(), s.map(ToOwned::to_owned))).collect();
        assert_eq!(names(name), want);
    }

    #[test]
    fn short_names_are_completed_by_their_labels() {
        check("a", &[("a", None), ("a.shop.svc.c.local", None)]);
        check("a.b", &[("a.b", None), ("a.b.svc.c.local", None), ("a.b.shop.svc.c.local", None)]);
        check("a.b.svc", &[("a.b.svc", None), ("a.b.svc.c.local", None)]);
        check("p.a.b", &[("p.a.b", None), ("p.a.b.svc.c.local", None)]);
        check("p.a.b.svc", &[("p.a.b.svc", None), ("p.a.b.svc.c.local", None)]);
        check("a.b.c.d.e", &[("a.b.c.d.e", None)]);
    }

    #[test]
    fn search_domains_are_seen_through_in_their_order() {
        let db = Some("db.example.com");
        check(
            "db.example.com.shop.svc.c.local",
            &[
                ("db.example.com.shop.svc.c.local", None),
                ("db.example.com", db),
                ("db.example.com.svc.c.local", db),
                // `svc.c.local` and `c.local` are ends of it, too.
                ("db.example.com.shop", Some("db.example.com.shop")),
                ("db.example.com.shop.svc", Some("db.example.com.shop.svc")),
            ],
        );
        check(
            "shop.svc.c.local",
            &[
                ("shop.svc.c.local", None),
                ("shop", Some("shop")),
                ("shop.shop.svc.c.local", Some("shop")),
                ("shop.svc", Some("shop.svc")),
                ("shop.svc.svc.c.local", Some("shop.svc")),
                ("shop.svc.shop.svc.c.local", Some("shop.svc")),
            ],
        );
    }

    #[test]
    fn a_domain_is_cut_off_at_a_dot_only() {
        check(
            "xc.local",
            &[
                ("xc.local", None),
                ("xc.local.svc.c.local", None),
                ("xc.local.shop.svc.c.local", None),
            ],
        );
    }

    #[test]
    fn wildcards_go_from_narrow_to_wide() {
        let of = |name| wildcards(name).collect::<Vec<_>>();
        assert_eq!(of("a.b.c"), ["*.b.c", "*.c"]);
        assert!(of("a").is_empty());
    }

    #[test]
    fn resolv_conf_says_where_to_search() {
        let parse = |text| SearchPath::parse(text).map(|path| path.0.join(" "));
        let text =
            "nameserver 10.96.0.10\nsearch Shop.svc.c.local svc.c.local. .\noptions ndots:5\n";
        assert_eq!(parse(text).as_deref(), Some("shop.svc.c.local svc.c.local"));
        assert_eq!(parse("search a\ndomain b\n").as_deref(), Some("b"));
        for nothing in ["", "nameserver 1.1.1.1", "search\n", "# search a", "search ."] {
            assert_eq!(parse(nothing), None, "{nothing}");
        }
        let many = format!("search {}", "a ".repeat(1000));
        assert_eq!(SearchPath::parse(&many).unwrap().0.len(), MOST_DOMAINS);
    }
}
