//! Peer authentications: what workloads ask of their peers becomes policies that deny those without an identity.

use std::collections::BTreeMap;

use culvert_proto::istio::security::{
    Action, Authorization as Wire, Group, Match, Rules, Scope, StringMatch, string_match::MatchType,
};

use super::{Output, view::View};
use crate::{
    objects::{Labels, Mode, PeerAuthentication, selects},
    resource::Resource,
    world::{MeshConfig, Space, World},
};

/// The one policy that is all most strict workloads need. `_` keeps it apart from objects' names.
const STRICT: &str = "istio_converted_static_strict";

/// The peer authentications that matter to a namespace.
#[derive(Debug, Default)]
pub(super) struct Authentications {
    /// Whether a workload that none selects asks for an identity.
    strict: bool,
    /// Those that select workloads: the labels, what they come to, and the name of their own policy; older ones first.
    selecting: Vec<(Labels, Effect, String)>,
    root: String,
}

/// What a peer authentication that selects workloads comes to.
#[derive(Debug)]
enum Effect {
    /// Nothing is asked.
    Nothing,
    /// An identity, on every port.
    Strict,
    /// What its own policy says.
    Own(Vec<Group>),
}

impl Authentications {
    pub(super) fn new(
        namespace: &str,
        space: &Space,
        root: Option<&Space>,
        config: &MeshConfig,
    ) -> Self {
        let widest = |space: &Space| {
            let wide = space.authentications.iter().filter(|(_, o)| o.selector().is_none());
            let oldest = wide.min_by_key(|(name, o)| (&o.metadata.creation_timestamp, *name));
            oldest.map_or(Mode::Unset, |(_, object)| object.mode())
        };
        let of_mesh = root.map_or(Mode::Unset, widest);
        let of_namespace = inherit(widest(space), of_mesh);
        let strict = of_namespace == Mode::Strict;
        // In the root it would be for the whole mesh, which no selector can be.
        let is_root = namespace == config.root_namespace;
        let selecting = space.authentications.iter();
        let selecting = selecting.filter(|(_, o)| !is_root && o.selector().is_some());
        let mut selecting: Vec<_> = selecting.collect();
        selecting.sort_by_key(|(name, object)| (&object.metadata.creation_timestamp, *name));
        let selecting = selecting.into_iter().filter_map(|(name, object)| {
            let name = format!("converted_peer_authentication_{name}");
            Some((object.selector()?.clone(), effect(object, of_namespace), name))
        });
        let selecting = selecting
            .map(|(labels, effect, name)| (labels, effect, format!("{namespace}/{name}")))
            .collect();
        Self { strict, selecting, root: config.root_namespace.clone() }
    }

    /// The policies that a workload with `labels` has to name; of several that select it the oldest counts.
    pub(super) fn keys_for(&self, labels: &Labels) -> Option<String> {
        let selecting = self.selecting.iter().find(|(wanted, ..)| selects(wanted, labels));
        let strict = || format!("{}/{STRICT}", self.root);
        match selecting {
            None => self.strict.then(strict),
            Some((_, Effect::Nothing, _)) => None,
            Some((_, Effect::Strict, _)) => Some(strict()),
            Some((_, Effect::Own(_), key)) => Some(key.clone()),
        }
    }
}

fn inherit(own: Mode, wider: Mode) -> Mode {
    if own == Mode::Unset { wider } else { own }
}

/// What a peer authentication comes to where the namespace asks for `wider`.
fn effect(object: &PeerAuthentication, wider: Mode) -> Effect {
    let strict = inherit(object.mode(), wider) == Mode::Strict;
    // A node cannot take mutual TLS away, so that disabled is permissive.
    let ports: BTreeMap<u16, bool> = object
        .ports()
        .filter(|(_, mode)| *mode != Mode::Unset)
        .map(|(port, mode)| (port, mode == Mode::Strict))
        .collect();
    let differing = ports.into_iter().filter(|(_, port)| *port != strict).map(|(port, _)| port);
    let differing: Vec<u16> = differing.collect();
    match (strict, differing.as_slice()) {
        (true, []) => Effect::Strict,
        (false, []) => Effect::Nothing,
        // All of: no identity, and none of these ports.
        (true, ports) => {
            let exempt = ports.iter().map(|&port| Match {
                not_destination_ports: vec![port.into()],
                ..Match::default()
            });
            let rules = std::iter::once(anonymous()).chain(exempt).map(only);
            Effect::Own(vec![Group { rules: rules.collect() }])
        }
        // For one of these ports: no identity.
        (false, ports) => {
            let groups = ports.iter().map(|&port| {
                let found = Match { destination_ports: vec![port.into()], ..anonymous() };
                Group { rules: vec![only(found)] }
            });
            Effect::Own(groups.collect())
        }
    }
}

fn only(found: Match) -> Rules {
    Rules { matches: vec![found] }
}

/// A peer that proved no identity.
fn anonymous() -> Match {
    let any = StringMatch { match_type: Some(MatchType::Presence(())) };
    Match { not_principals: vec![any], ..Match::default() }
}

/// The policies of a namespace's own peer authentications.
pub(super) fn all(namespace: &str, _space: &Space, view: &View, output: &mut Output) {
    for (_, effect, key) in &view.authentications.selecting {
        if let Effect::Own(groups) = effect {
            let name = key.split_once('/').map_or(key.as_str(), |(_, name)| name);
            output.add(Resource::authorization(&deny(namespace, name, groups.clone())));
        }
    }
}

/// The policy that strict workloads share; it is there as soon as any peer authentication is.
pub(super) fn shared(world: &World, config: &MeshConfig, output: &mut Output) {
    if world.authentications > 0 {
        let groups = vec![Group { rules: vec![only(anonymous())] }];
        output.add(Resource::authorization(&deny(&config.root_namespace, STRICT, groups)));
    }
}

fn deny(namespace: &str, name: &str, groups: Vec<Group>) -> Wire {
    Wire {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        scope: Scope::WorkloadSelector.into(),
        action: Action::Deny.into(),
        groups,
        ..Wire::default()
    }
}
