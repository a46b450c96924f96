//! Allows IP fragmentation on a socket that quinn has forbidden it on.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// Sets path-MTU discovery to the kernel's own default (`WANT`): a datagram that fits the path's MTU
/// carries the "don't fragment" bit, a longer one is cut up by this host.
///
/// # Errors
/// What the system says.
#[cfg(target_os = "linux")]
pub(super) fn allow(socket: &UdpSocket) -> io::Result<()> {
    if socket.local_addr()?.is_ipv6() {
        set(
            socket,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_WANT,
        )?;
        set(socket, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 0)?;
    }
    // Also for IPv6 sockets: they may carry IPv4 in mapped addresses.
    set(
        socket,
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_WANT,
    )
}

/// Other systems are for development on one host, where datagrams of full length pass.
#[cfg(not(target_os = "linux"))]
pub(super) fn allow(_: &UdpSocket) -> io::Result<()> {
    Ok(())
}

#[cfg(target_os = "linux")]
fn set(
    socket: &UdpSocket,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the descriptor is open for the length of the call since `socket` is borrowed, and the
    // value is a live `c_int` whose size is the one given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use quinn::{Runtime, TokioRuntime};

    use super::*;

    fn discovery(socket: &UdpSocket) -> libc::c_int {
        let mut value: libc::c_int = -1;
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the descriptor is open, and both pointers are to live values of the size given.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                std::ptr::from_mut(&mut value).cast(),
                &raw mut length,
            )
        };
        assert_eq!(result, 0);
        value
    }

    #[tokio::test]
    async fn what_quinn_forbids_is_allowed_again() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(socket) = UdpSocket::bind(address) else {
                // A machine without IPv6.
                continue;
            };
            let sending = socket.try_clone().unwrap();
            let _quinn = TokioRuntime.wrap_udp_socket(socket).unwrap();
            assert_eq!(discovery(&sending), libc::IP_PMTUDISC_PROBE);
            allow(&sending).unwrap();
            assert_eq!(discovery(&sending), libc::IP_PMTUDISC_WANT);
        }
    }
}
