// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Safe wrappers for what the kernel gives to a BPF program: contexts, sockets, helpers. The one file with `unsafe`.
//!
//! Nothing is decided here, and no map lives here: a map in the library would end up in every object.

#![expect(clippy::cast_possible_truncation, reason = "ports and sizes that fit, but come in words")]
#![expect(
    unsafe_code,
    reason = "kernel contexts and helpers are raw pointers; this file is the fence around them"
)]

use core::{
    ffi::{c_int, c_long, c_void},
    mem::{MaybeUninit, offset_of},
    ptr::{self, NonNull},
};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_SK_STORAGE_GET_F_CREATE, BPF_SOCK_OPS_STATE_CB,
        BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE, SO_BINDTODEVICE,
        SO_MARK, SO_REUSEADDR, bpf_sk_lookup, bpf_sock, bpf_sock_addr, bpf_sock_ops,
    },
    btf_maps::SkStorage,
    helpers::{
        bpf_get_netns_cookie, bpf_map_lookup_elem, bpf_redirect, bpf_setsockopt, bpf_sk_assign,
        bpf_sk_fullsock, bpf_sk_release, bpf_skb_cgroup_id, bpf_skb_load_bytes_relative,
        bpf_skb_store_bytes, generated::bpf_sk_storage_get,
    },
    maps::{HashMap, LpmTrie, LruHashMap, PerCpuArray, SockMap},
    programs::{SkLookupContext, SockAddrContext, SockOpsContext, TcContext},
};
use culvert_abi::{Outcome, PodAddr, PodNetwork, Slot};

use crate::{
    Family, Owner,
    endpoint::{Connection, Endpoint, v4_mapped, v6},
    host::Maker,
    packet::{Frame, Position},
};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const AF_PACKET: u32 = 17;
const AF_XDP: u32 = 44;
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

/// Gives `value` back, mixed with `unknown` and unmixed again, which the verifier does not see through.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn obscure(value: u32, unknown: u32) -> u32 {
    let mut value = u64::from(value);
    // SAFETY: changes nothing but this register.
    unsafe {
        core::arch::asm!(
            "{value} ^= {unknown}",
            "{value} ^= {unknown}",
            value = inout(reg) value,
            unknown = in(reg) u64::from(unknown),
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    value as u32
}

/// The same for the host.
#[cfg(not(target_arch = "bpf"))]
const fn obscure(value: u32, _unknown: u32) -> u32 {
    value
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
    load!(ctx.sock_addr, bpf_sock_addr, user_port) != 0
        && load!(ctx.sock_addr, bpf_sock_addr, type_) == SOCK_STREAM
        && load!(ctx.sock_addr, bpf_sock_addr, protocol) == IPPROTO_TCP
}

/// The cookie of the socket's network namespace.
#[inline(always)]
pub fn netns_cookie_of_bind(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes the context of any bind program.
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

    #[inline(always)]
    fn storage(
        &self,
        map: &SkStorage<u32>,
        initial: *mut u32,
        flags: u64,
    ) -> Option<NonNull<c_void>> {
        storage(map, self.sk, initial, flags)
    }
}

#[inline(always)]
fn storage(
    map: &SkStorage<u32>,
    sk: NonNull<bpf_sock>,
    initial: *mut u32,
    flags: u64,
) -> Option<NonNull<c_void>> {
    // SAFETY: `map` is a map; `sk` is the kernel's, for as long as the context; `initial` is null or an integer of the
    // map's value type, which the helper copies.
    NonNull::new(unsafe {
        bpf_sk_storage_get(map_ptr(map), sk.as_ptr().cast(), initial.cast(), flags)
    })
}

/// A look-up that an `sk_lookup` program answers.
pub struct Lookup {
    /// Family of the packet.
    pub family: Family,
    /// IP protocol number.
    pub protocol: u32,
    /// Both ends, the local one being where the packet goes to.
    pub connection: Connection,
}

impl Lookup {
    /// Reads `ctx`; `None` for families other than IPv4 and IPv6.
    #[inline(always)]
    pub fn of(ctx: &SkLookupContext) -> Option<Self> {
        let (family, local, remote) = match load!(ctx.lookup, bpf_sk_lookup, family) {
            AF_INET => (
                Family::V4,
                v4_mapped(load!(ctx.lookup, bpf_sk_lookup, local_ip4)),
                v4_mapped(load!(ctx.lookup, bpf_sk_lookup, remote_ip4)),
            ),
            AF_INET6 => (
                Family::V6,
                load_v6!(ctx.lookup, bpf_sk_lookup, local_ip6),
                load_v6!(ctx.lookup, bpf_sk_lookup, remote_ip6),
            ),
            _ => return None,
        };
        let local_port = load!(ctx.lookup, bpf_sk_lookup, local_port) as u16;
        // A word in every kernel's eyes; since 5.17 the upper half is padding.
        let remote_port = u16::from_be(load!(ctx.lookup, bpf_sk_lookup, remote_port) as u16);
        Some(Self {
            family,
            protocol: load!(ctx.lookup, bpf_sk_lookup, protocol),
            connection: Connection {
                local: Endpoint { addr: local, port: local_port },
                remote: Endpoint { addr: remote, port: remote_port },
            },
        })
    }
}

/// A listening socket taken from a SOCKMAP, released on drop as the verifier demands.
pub struct Listener(NonNull<c_void>);

impl Listener {
    /// The listener in `slot`; `None` if the slot is empty.
    #[inline(always)]
    pub fn find(listeners: &SockMap, slot: Slot) -> Option<Self> {
        let slot = slot as u32;
        // SAFETY: `listeners` is a map and the key is of its key type.
        NonNull::new(unsafe {
            bpf_map_lookup_elem(map_ptr(listeners), ptr::from_ref(&slot).cast())
        })
        .map(Self)
    }

    /// Answers the look-up with this listener.
    #[inline(always)]
    pub fn assign(&self, ctx: &SkLookupContext) -> Result<(), c_long> {
        // SAFETY: the context is the kernel's, and the reference to the socket is held by `self`.
        match unsafe { bpf_sk_assign(ctx.as_ptr(), self.0.as_ptr(), 0) } {
            0 => Ok(()),
            errno => Err(errno),
        }
    }
}

impl Drop for Listener {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: `find` acquired this reference, and nothing else releases it.
        unsafe { bpf_sk_release(self.0.as_ptr()) };
    }
}

/// A frame at tc, with what the kernel knows about it.
pub struct Skb<'a>(pub &'a TcContext);

impl Skb<'_> {
    /// Its mark.
    #[inline(always)]
    pub fn mark(&self) -> u32 {
        load!(self.0.skb.skb, __sk_buff, mark)
    }

    /// The cgroup that created its socket; 0 without a full socket (forwarded, or answering for a closed one).
    #[inline(always)]
    pub fn cgroup_id(&self) -> u64 {
        // SAFETY: the helper takes the context of any tc program.
        unsafe { bpf_skb_cgroup_id(self.0.skb.skb) }
    }

    /// The index of the interface that it leaves by.
    #[inline(always)]
    pub fn interface(&self) -> u32 {
        load!(self.0.skb.skb, __sk_buff, ifindex)
    }

    /// The socket that it is of, if there is one.
    #[inline(always)]
    fn any_socket(&self) -> Option<NonNull<bpf_sock>> {
        // SAFETY: the context is the kernel's.
        let field = unsafe { &raw const (*self.0.skb.skb).__bindgen_anon_2 };
        // SAFETY: as above; a pointer in a context is loaded whole, as the verifier demands.
        let sk = unsafe { field.cast::<*mut bpf_sock>().read() };
        NonNull::new(sk)
    }

    /// What its socket tells of who made it.
    #[inline(always)]
    pub fn maker(&self) -> Maker {
        let Some(sk) = self.any_socket() else { return Maker::Unknown };
        match load!(sk.as_ptr(), bpf_sock, family) {
            AF_PACKET | AF_XDP => Maker::Hand,
            _ => Maker::Kernel,
        }
    }

    /// The full socket that it is of, if there is one.
    #[inline(always)]
    fn socket(&self) -> Option<NonNull<bpf_sock>> {
        let sk = self.any_socket()?;
        // SAFETY: the helper takes the socket of a context, once that is known to be there.
        NonNull::new(unsafe { bpf_sk_fullsock(sk.as_ptr()) })
    }

    /// Whether [`Socket::set_bypass`] has noted that it may leave without capture.
    #[inline(always)]
    pub fn bypasses(&self, bypass: &SkStorage<u32>) -> bool {
        let noted = self.socket().and_then(|sk| storage(bypass, sk, ptr::null_mut(), 0));
        // SAFETY: an element of this map is four bytes wide and aligned, and lives as long as the socket.
        noted.is_some_and(|noted| unsafe { noted.cast::<u32>().read() } == 1)
    }

    /// Whether its socket is bound to an interface, and so takes no answer that comes by another.
    #[inline(always)]
    pub fn is_bound(&self) -> bool {
        self.socket().is_some_and(|sk| load!(sk.as_ptr(), bpf_sock, bound_dev_if) != 0)
    }

    /// Marks it, and lets it arrive at `lo` from an Ethernet header without addresses: any other is for another host
    /// there. Gives the program's answer, or `None` if the header could not be written.
    #[inline(always)]
    pub fn to_loopback(&self, mark: u32) -> Option<i32> {
        /// Of `lo`, in every namespace.
        const LOOPBACK: u32 = 1;
        let skb = self.0.skb.skb;
        // SAFETY: the context is the kernel's, and this field one that it lets programs write.
        unsafe { (&raw mut (*skb).mark).write_volatile(mark) };
        let addresses = [0_u8; 12];
        // SAFETY: twelve initialised bytes, and the helper checks that the frame has as many.
        let stored = unsafe {
            bpf_skb_store_bytes(skb, 0, addresses.as_ptr().cast(), addresses.len() as u32, 0)
        };
        // SAFETY: the helper takes two numbers.
        (stored == 0).then(|| unsafe { bpf_redirect(LOOPBACK, BPF_F_INGRESS.into()) } as i32)
    }
}

impl Frame for Skb<'_> {
    #[inline(always)]
    fn protocol(&self) -> u16 {
        u16::from_be(load!(self.0.skb.skb, __sk_buff, protocol) as u16)
    }

    /// Of the first, linear part of the packet alone, in which the kernel keeps headers.
    #[inline(always)]
    fn bytes<const N: usize>(&self, position: Position) -> Option<[u8; N]> {
        let Position { origin, offset } = position;
        let mut bytes = MaybeUninit::<[u8; N]>::uninit();
        let to = bytes.as_mut_ptr().cast();
        let skb = self.0.skb.skb.cast();
        // SAFETY: `to` points to `N` bytes on the stack; the helper checks `offset` against the frame.
        let result = unsafe { bpf_skb_load_bytes_relative(skb, offset, to, N as u32, origin) };
        // SAFETY: the helper returned 0, so it wrote all `N` bytes.
        (result == 0).then(|| unsafe { bytes.assume_init() })
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        load!(self.0.skb.skb, __sk_buff, len)
    }

    #[inline(always)]
    fn any(&self, value: u32) -> u32 {
        obscure(value, load!(self.0.skb.skb, __sk_buff, len))
    }
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
