//! The generated code, in modules that nest as the packages do.

#![allow(clippy::all, clippy::pedantic, clippy::restriction, reason = "written by a generator")]
#![allow(missing_docs, unused_qualifications, unreachable_pub, reason = "written by a generator")]

/// Envoy's discovery protocol, as far as its delta variant needs it.
pub mod envoy {
    pub mod config {
        pub mod core {
            pub mod v3 {
                tonic::include_proto!("envoy.config.core.v3");
            }
        }
    }
    pub mod service {
        pub mod discovery {
            pub mod v3 {
                tonic::include_proto!("envoy.service.discovery.v3");
            }
        }
    }
}

/// What google.rpc says of errors.
pub mod google {
    pub mod rpc {
        tonic::include_proto!("google.rpc");
    }
}

/// The mesh's own resources and services.
pub mod istio {
    pub mod security {
        tonic::include_proto!("istio.security");
    }
    pub mod v1 {
        pub mod auth {
            tonic::include_proto!("istio.v1.auth");
        }
    }
    pub mod workload {
        tonic::include_proto!("istio.workload");

        pub mod zds {
            tonic::include_proto!("istio.workload.zds");
        }
    }
}
