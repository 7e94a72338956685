// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Safe wrappers for what the kernel gives to a BPF program: contexts, sockets, helpers. `unsafe` is here, and
//! nowhere else.
//!
//! Nothing is decided here, and no map lives here: a map in the library would end up in every object.

#![expect(clippy::cast_possible_truncation, reason = "ports and sizes that fit, but come in words")]
#![expect(
    unsafe_code,
    reason = "kernel contexts and helpers are raw pointers; this module is the fence around them"
)]

use core::{
    ffi::{c_int, c_long, c_void},
    mem::offset_of,
    ptr::{self, NonNull},
};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_SK_STORAGE_GET_F_CREATE, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
        BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE, SO_BINDTODEVICE, SO_MARK, SO_REUSEADDR,
        bpf_sock, bpf_sock_addr, bpf_sock_ops,
    },
    btf_maps::SkStorage,
    helpers::{
        bpf_get_netns_cookie, bpf_map_lookup_elem, bpf_setsockopt, generated::bpf_sk_storage_get,
    },
    maps::{HashMap, LpmTrie, LruHashMap, PerCpuArray},
    programs::{SockAddrContext, SockOpsContext},
};
use culvert_abi::{Outcome, PodAddr, PodNetwork};

use crate::{
    Owner,
    endpoint::{Connection, Endpoint, v4_mapped, v6},
};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const SOCK_STREAM: u32 = 1;
const IPPROTO_TCP: u32 = 6;
const SOL_SOCKET: c_int = 1;
const IFNAMSIZ: usize = 16;

/// Loads one field of a kernel structure, a word wide.
macro_rules! load {
    ($base:expr, $type:ty, $($field:tt)+) => {
        load_u32::<{ offset_of!($type, $($field)+) }>($base.cast())
    };
}

/// Loads an IPv6 address of a context, word by word.
macro_rules! load_v6 {
    ($base:expr, $type:ty, $field:ident) => {
        v6([
            load_u32::<{ offset_of!($type, $field) }>($base.cast()),
            load_u32::<{ offset_of!($type, $field) + 4 }>($base.cast()),
            load_u32::<{ offset_of!($type, $field) + 8 }>($base.cast()),
            load_u32::<{ offset_of!($type, $field) + 12 }>($base.cast()),
        ])
    };
}

mod lookup;
mod skb;

pub use lookup::{Listener, Lookup};
pub use skb::Skb;

/// Loads the word at a constant offset.
///
/// In assembly, because the verifier takes a load from a context only at a constant offset from the unchanged pointer,
/// while the compiler may merge two loads into one from a computed address, volatile or not.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn load_u32<const OFFSET: usize>(base: *const c_void) -> u32 {
    let word: u64;
    // SAFETY: only reads, and the verifier checks that the structure behind `base` has a word there.
    unsafe {
        core::arch::asm!(
            "{word} = *(u32 *)({base} + {offset})",
            word = out(reg) word,
            base = in(reg) base,
            offset = const OFFSET,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    word as u32
}

/// The same for the host, where the programs are only checked, never run.
#[cfg(not(target_arch = "bpf"))]
fn load_u32<const OFFSET: usize>(base: *const c_void) -> u32 {
    // SAFETY: the caller's type has a word at `OFFSET`.
    let word = unsafe { base.byte_add(OFFSET) }.cast::<u32>();
    // SAFETY: as above.
    unsafe { word.read() }
}

/// What a sockops program is called for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// `connect()`, after the source address was chosen and before the SYN is built.
    Connect,
    /// The socket left its last TCP state; reported only after [`report_close`].
    Close,
    /// Anything else.
    Other,
}

/// The event that `ctx` reports.
#[inline(always)]
pub fn event(ctx: &SockOpsContext) -> Event {
    match load!(ctx.ops, bpf_sock_ops, op) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => Event::Connect,
        BPF_SOCK_OPS_STATE_CB if new_state(ctx) == BPF_TCP_CLOSE => Event::Close,
        _ => Event::Other,
    }
}

/// The second argument of `BPF_SOCK_OPS_STATE_CB`.
#[inline(always)]
fn new_state(ctx: &SockOpsContext) -> u32 {
    load_u32::<{ offset_of!(bpf_sock_ops, __bindgen_anon_1) + size_of::<u32>() }>(ctx.ops.cast())
}

/// Both ends of the socket; `None` for families other than IPv4 and IPv6.
#[inline(always)]
pub fn connection(ctx: &SockOpsContext) -> Option<Connection> {
    let (local, remote) = match load!(ctx.ops, bpf_sock_ops, family) {
        AF_INET => (
            v4_mapped(load!(ctx.ops, bpf_sock_ops, local_ip4)),
            v4_mapped(load!(ctx.ops, bpf_sock_ops, remote_ip4)),
        ),
        AF_INET6 => (
            load_v6!(ctx.ops, bpf_sock_ops, local_ip6),
            load_v6!(ctx.ops, bpf_sock_ops, remote_ip6),
        ),
        _ => return None,
    };
    // Both are 32 bits wide, but only `local_port` is in host order.
    let local_port = load!(ctx.ops, bpf_sock_ops, local_port) as u16;
    let remote_port = u32::from_be(load!(ctx.ops, bpf_sock_ops, remote_port)) as u16;
    Some(Connection {
        local: Endpoint { addr: local, port: local_port },
        remote: Endpoint { addr: remote, port: remote_port },
    })
}

/// The cookie of the socket's network namespace. Linux 5.15 or newer: before, a program that asks is refused.
#[inline(always)]
pub fn netns_cookie(ctx: &SockOpsContext) -> u64 {
    // SAFETY: the helper takes the context of any sockops program.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// Sets the socket's whole mark, and with it forgets the route it had.
#[inline(always)]
pub fn set_mark(ctx: &SockOpsContext, mut mark: u32) -> Result<(), c_long> {
    set_option(ctx.as_ptr(), SO_MARK, &mut mark)
}

/// Clears `SO_BINDTODEVICE`: an outgoing interface would take precedence over the route that captures.
#[inline(always)]
pub fn unbind_device(ctx: &SockOpsContext) -> Result<(), c_long> {
    set_option(ctx.as_ptr(), SO_BINDTODEVICE, &mut [0_u8; IFNAMSIZ])
}

/// Asks for [`Event::Close`] of this socket; flags that other programs set stay.
#[inline(always)]
pub fn report_close(ctx: &SockOpsContext) -> Result<(), i32> {
    ctx.set_cb_flags(
        (load!(ctx.ops, bpf_sock_ops, bpf_sock_ops_cb_flags) | BPF_SOCK_OPS_STATE_CB_FLAG)
            .cast_signed(),
    )
}

/// Whether `bind()` names a port, and for a TCP socket. One that the kernel is to choose is free anyway.
#[inline(always)]
pub fn binds_tcp_port(ctx: &SockAddrContext) -> bool {
    load!(ctx.sock_addr, bpf_sock_addr, user_port) != 0 && is_tcp(ctx)
}

/// Whether the socket is one of TCP.
#[inline(always)]
pub fn is_tcp(ctx: &SockAddrContext) -> bool {
    load!(ctx.sock_addr, bpf_sock_addr, type_) == SOCK_STREAM
        && load!(ctx.sock_addr, bpf_sock_addr, protocol) == IPPROTO_TCP
}

/// Writes `cookie` to what `noted` holds for the socket; `false` where it holds nothing.
#[inline(always)]
pub fn note(ctx: &SockAddrContext, noted: &SkStorage<u64>, cookie: u64) -> bool {
    let room = socket_of(ctx).and_then(|sk| storage(noted, sk, ptr::null_mut(), 0));
    let Some(room) = room else { return false };
    // SAFETY: an element of this map is eight bytes wide and aligned, and lives as long as the socket.
    unsafe { room.cast::<u64>().write(cookie) };
    true
}

/// Lets `noted` hold `cookie` for the socket, if there is memory.
#[inline(always)]
pub fn note_anew(ctx: &SockAddrContext, noted: &SkStorage<u64>, mut cookie: u64) {
    if let Some(sk) = socket_of(ctx) {
        storage(noted, sk, &raw mut cookie, BPF_SK_STORAGE_GET_F_CREATE.into());
    }
}

#[inline(always)]
fn socket_of(ctx: &SockAddrContext) -> Option<NonNull<bpf_sock>> {
    // SAFETY: the context is the kernel's.
    let field = unsafe { &raw const (*ctx.sock_addr).__bindgen_anon_1 };
    // SAFETY: as above; a pointer in a context is loaded whole, as the verifier demands.
    NonNull::new(unsafe { field.cast::<*mut bpf_sock>().read() })
}

/// The cookie of the socket's network namespace.
#[inline(always)]
pub fn netns_cookie_of_address(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes the context of any program at an address hook.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// Sets `SO_REUSEADDR`. Linux 6.1 or newer: before, a bind program that does is refused, or told that there is no such
/// option.
#[inline(always)]
pub fn reuse_address(ctx: &SockAddrContext) -> Result<(), c_long> {
    set_option(ctx.as_ptr(), SO_REUSEADDR, &mut 1_u32)
}

#[inline(always)]
fn set_option<T>(ctx: *mut c_void, option: u32, value: &mut T) -> Result<(), c_long> {
    let value = ptr::from_mut(value).cast();
    let length = (size_of::<T>() as u32).cast_signed();
    // SAFETY: `ctx` is the kernel's, and `value` points to `size_of::<T>()` initialised bytes on the stack, which the
    // helper copies.
    match unsafe { bpf_setsockopt(ctx, SOL_SOCKET, option.cast_signed(), value, length) } {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// The socket of a sockops context: proof that it is a full one.
pub struct Socket<'a> {
    sk: NonNull<bpf_sock>,
    _ctx: &'a SockOpsContext,
}

impl<'a> Socket<'a> {
    /// `None` while there is no full socket (a request in `SYN_RECV`).
    #[inline(always)]
    pub fn of(ctx: &'a SockOpsContext) -> Option<Self> {
        // SAFETY: the context is the kernel's.
        let field = unsafe { &raw const (*ctx.ops).__bindgen_anon_2 };
        // SAFETY: as above; a pointer in a context is loaded whole, as the verifier demands.
        let sk = unsafe { field.cast::<*mut bpf_sock>().read() };
        NonNull::new(sk).map(|sk| Self { sk, _ctx: ctx })
    }

    /// Its mark.
    #[inline(always)]
    pub fn mark(&self) -> u32 {
        load!(self.sk.as_ptr(), bpf_sock, mark)
    }

    /// Whether `own` holds a tag of the proxy for it.
    #[inline(always)]
    pub fn owner(&self, own: &SkStorage<u32>) -> Owner {
        match self.storage(own, ptr::null_mut(), 0) {
            None => Owner::App,
            Some(_) => Owner::Proxy,
        }
    }

    /// Tags it as the proxy's; `None` if the kernel could not store the tag.
    #[inline(always)]
    pub fn tag(&self, own: &SkStorage<u32>) -> Option<()> {
        self.storage(own, &mut 1, BPF_SK_STORAGE_GET_F_CREATE.into()).map(|_| ())
    }

    /// Notes in `bypass` whether its SYN may leave without capture; `None` if the kernel could not store that it may.
    ///
    /// What an earlier `connect()` has noted is overwritten.
    #[inline(always)]
    pub fn set_bypass(&self, bypass: &SkStorage<u32>, allowed: bool) -> Option<()> {
        let noted = if allowed {
            self.storage(bypass, &mut 1, BPF_SK_STORAGE_GET_F_CREATE.into())
        } else {
            self.storage(bypass, ptr::null_mut(), 0)
        };
        let Some(noted) = noted else { return (!allowed).then_some(()) };
        // SAFETY: an element of this map is four bytes wide and aligned, and lives as long as the socket.
        unsafe { noted.cast::<u32>().write(u32::from(allowed)) };
        Some(())
    }

    /// What `noted` holds for it.
    #[inline(always)]
    pub fn noted(&self, noted: &SkStorage<u64>) -> Option<u64> {
        let noted = self.storage(noted, ptr::null_mut(), 0)?;
        // SAFETY: an element of this map is eight bytes wide and aligned, and lives as long as the socket.
        Some(unsafe { noted.cast::<u64>().read() })
    }

    #[inline(always)]
    fn storage<V>(
        &self,
        map: &SkStorage<V>,
        initial: *mut V,
        flags: u64,
    ) -> Option<NonNull<c_void>> {
        storage(map, self.sk, initial, flags)
    }
}

#[inline(always)]
fn storage<V>(
    map: &SkStorage<V>,
    sk: NonNull<bpf_sock>,
    initial: *mut V,
    flags: u64,
) -> Option<NonNull<c_void>> {
    // SAFETY: `map` is a map; `sk` is the kernel's, for as long as the context; `initial` is null or an integer of the
    // map's value type, which the helper copies.
    NonNull::new(unsafe {
        bpf_sk_storage_get(map_ptr(map), sk.as_ptr().cast(), initial.cast(), flags)
    })
}

/// The value of `key`, copied out.
#[inline(always)]
pub fn find<K, V: Copy>(map: &HashMap<K, V>, key: &K) -> Option<V> {
    // SAFETY: these maps are not preallocated, so an element lives until the program ends, and user space replaces
    // values whole.
    unsafe { map.get(key) }.copied()
}

/// Whether the narrowest network of the pod that holds `addr` is in `networks` with the value 1.
///
/// By hand, because aya packs the key, which is then copied byte by byte.
#[inline(always)]
pub fn in_networks(networks: &LpmTrie<PodAddr, u8>, pod: u32, addr: culvert_abi::Addr) -> bool {
    let key = PodNetwork { bits: PodNetwork::bits(128), pod, addr };
    // SAFETY: `networks` is a map, and `key` has the layout of its keys.
    let found = unsafe { bpf_map_lookup_elem(map_ptr(networks), ptr::from_ref(&key).cast()) };
    // SAFETY: an element of this map is a byte, which lives until the program ends.
    NonNull::new(found).is_some_and(|found| unsafe { found.cast::<u8>().read() } == 1)
}

/// Whether an LRU map holds `key`; the value, which may be recycled at any time, is not looked at.
#[inline(always)]
pub fn holds<K, V>(map: &LruHashMap<K, V>, key: &K) -> bool {
    map.get_ptr(key).is_some()
}

/// Counts an outcome.
///
/// Not atomic, which this target cannot be: a program that interrupts another between load and store of the same counter
/// on the same CPU costs one count.
#[inline(always)]
pub fn count(outcomes: &PerCpuArray<u64>, outcome: Outcome) {
    if let Some(counter) = outcomes.get_ptr_mut(outcome as u32) {
        // SAFETY: the element is this CPU's, aligned and eight bytes wide, for as long as the program runs.
        let counter = unsafe { &mut *counter };
        *counter = counter.wrapping_add(1);
    }
}

/// The kernel relocates the address of a map's definition to the map itself.
#[inline(always)]
fn map_ptr<M>(map: &M) -> *mut c_void {
    ptr::from_ref(map).cast_mut().cast()
}

/// What an object holds beside its programs: the licence that the kernel demands, and a panic handler that is never
/// reached, because the verifier would refuse the loop.
#[macro_export]
macro_rules! object {
    () => {
        #[panic_handler]
        fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
            loop {}
        }

        #[expect(unsafe_code, reason = "the kernel finds the licence by its section")]
        #[unsafe(link_section = "license")]
        #[used]
        static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
    };
}
