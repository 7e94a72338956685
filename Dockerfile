# syntax=docker/dockerfile:1
# Builds nothing by itself: `cargo xtask` knows how.

# What the binary runs on: glibc and its loader, no shell.
ARG BASE=gcr.io/distroless/cc-debian12

FROM rust:1.95.0-bookworm AS build
WORKDIR /culvert
COPY . .
RUN cargo xtask setup --build \
 && cargo xtask build-ebpf \
 && cargo build --release --locked --package culvert --bin culvert

FROM ${BASE}
COPY --from=build /culvert/target/release/culvert /usr/local/bin/culvert
COPY LICENSE ebpf/LICENSE-MIT ebpf/LICENSE-GPL2 /usr/share/doc/culvert/
ENTRYPOINT ["/usr/local/bin/culvert", "run"]
