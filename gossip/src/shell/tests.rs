//! Whole meshes: in virtual time over memory, and in real time over UDP.

mod hostile;
mod mesh;
mod real_udp;
mod virtual_time;
