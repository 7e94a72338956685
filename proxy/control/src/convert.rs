//! From resources as they are on the wire to the mesh's records. Pure and total: a resource becomes a record whole, or is
//! refused with what is wrong with it; nothing of it is dropped, guessed or cut short.
//!
//! References between records are not followed here: they may arrive in any order, and lead anywhere.

mod ends;
mod policy;
mod service;
mod workload;

#[cfg(test)]
mod tests;

use culvert_mesh::{IdentityError, Update};
use culvert_proto::istio::security::Authorization;
use culvert_proto::istio::workload::{Address, address};
use prost::Message;

/// Why a resource is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConvertError {
    /// The type of the response was not asked for.
    #[error("type is not subscribed to")]
    UnknownType,
    /// The resource is of another type than its response.
    #[error("resource is of another type than its response")]
    OtherType,
    /// The resource is only a name.
    #[error("resource has no content")]
    NoBody,
    /// More resources than are remembered.
    #[error("there are too many resources")]
    TooMany,
    /// No uid and no host name is as long.
    #[error("name is too long")]
    NameTooLong,
    /// It is not what its type says.
    #[error("content is malformed")]
    Malformed(#[source] prost::DecodeError),
    /// It is neither a workload nor a service.
    #[error("address is neither a workload nor a service")]
    NoAddress,
    /// It would not be found again by its name.
    #[error("resource describes {0:?}, which is not its name")]
    Misnamed(String),
    /// A field is empty that must not be.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// A field has a value that this version does not know.
    #[error("{field} has the unknown value {value}")]
    Unknown {
        /// The field.
        field: &'static str,
        /// Its number on the wire.
        value: i32,
    },
    /// An address is neither IPv4 nor IPv6.
    #[error("{field} has an address of {length} bytes")]
    AddressLength {
        /// The field.
        field: &'static str,
        /// How many bytes it has.
        length: usize,
    },
    /// A prefix is longer than its address.
    #[error("{field} has a prefix of {length} bits")]
    PrefixLength {
        /// The field.
        field: &'static str,
        /// How many bits it has.
        length: u32,
    },
    /// A port is none.
    #[error("{field} has the port {port}")]
    Port {
        /// The field.
        field: &'static str,
        /// The number.
        port: u32,
    },
    /// A text does not name a service.
    #[error("{field} names {name:?}, which is not namespace/hostname")]
    ServiceName {
        /// The field.
        field: &'static str,
        /// The text.
        name: String,
    },
    /// A waypoint or gateway is nowhere.
    #[error("{0} has no destination")]
    NoDestination(&'static str),
    /// A condition on a text says nothing about it.
    #[error("{0} has a match that says nothing")]
    NoMatch(&'static str),
    /// Trust domain, namespace and service account make no identity.
    #[error("identity is impossible")]
    Identity(#[from] IdentityError),
}

/// The update that is the resource `name` of type `istio.workload.Address` with the content `body`.
pub fn address(name: &str, body: &[u8]) -> Result<Update, ConvertError> {
    match decode::<Address>(body)?.r#type.ok_or(ConvertError::NoAddress)? {
        address::Type::Workload(raw) => {
            let workload = workload::workload(raw)?;
            named(&workload.uid, *workload.uid == *name)?;
            Ok(Update::Workload(workload))
        }
        address::Type::Service(raw) => {
            let service = service::service(raw)?;
            let key = service.key.to_string();
            named(&key, key.eq_ignore_ascii_case(name))?;
            Ok(Update::Service(service))
        }
    }
}

/// The update that is the resource `name` of type `istio.security.Authorization` with the content `body`.
pub fn authorization(name: &str, body: &[u8]) -> Result<Update, ConvertError> {
    let policy = policy::policy(decode::<Authorization>(body)?)?;
    named(&policy.key, *policy.key == *name)?;
    Ok(Update::Policy(policy))
}

/// The updates that undo the resource `name` of type `istio.workload.Address`: it may be a uid, or a service's name, whose
/// host may be written in any case.
pub fn address_removal(name: &str) -> impl Iterator<Item = Update> + use<> {
    let as_service = name.split_once('/').and_then(|(namespace, host)| {
        let lower = format!("{namespace}/{}", host.to_ascii_lowercase());
        (!host.contains('/') && lower != name).then_some(lower)
    });
    [Some(name.to_owned()), as_service]
        .into_iter()
        .flatten()
        .map(|name| Update::RemoveAddress(name.into()))
}

/// The updates that undo the resource `name` of type `istio.security.Authorization`.
pub fn authorization_removal(name: &str) -> impl Iterator<Item = Update> + use<> {
    std::iter::once(Update::RemovePolicy(name.into()))
}

fn decode<M: Message + Default>(body: &[u8]) -> Result<M, ConvertError> {
    M::decode(body).map_err(ConvertError::Malformed)
}

/// A record is removed by its resource's name, so both have to say the same.
fn named(key: &str, by_name: bool) -> Result<(), ConvertError> {
    if by_name { Ok(()) } else { Err(ConvertError::Misnamed(key.to_owned())) }
}

/// The value of an enumeration, if this version knows it.
fn known<E: TryFrom<i32>>(field: &'static str, value: i32) -> Result<E, ConvertError> {
    E::try_from(value).ok().ok_or(ConvertError::Unknown { field, value })
}
