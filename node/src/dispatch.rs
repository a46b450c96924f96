//! Where a request goes: freeness, policies and the course of one placement. Pure cores.
