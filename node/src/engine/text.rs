//! Ids to text: whole characters only, stop strings held back. The same at every host, and rebuilt
//! from ids alone after a replay.
