# syntax=docker/dockerfile:1
# Builds nothing by itself: `cargo xtask` knows how.

FROM rust:1.95.0-bookworm AS build
WORKDIR /culvert
COPY . .
RUN cargo xtask setup \
 && cargo xtask build-ebpf \
 && cargo build --release --locked --package culvert --bin culvert

# glibc and its loader, and no shell.
FROM gcr.io/distroless/cc-debian12
COPY --from=build /culvert/target/release/culvert /usr/local/bin/culvert
COPY LICENSE ebpf/LICENSE-MIT ebpf/LICENSE-GPL2 /usr/share/doc/culvert/
ENTRYPOINT ["/usr/local/bin/culvert", "run"]
