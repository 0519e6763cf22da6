"""What the server survives: each row of the table, and the tests that prove it. Files without a folder are here.

* A malformed message of any frame count, from anybody who can connect: others are served without a pause; counted;
  health probes the serving loop itself.
  `fuzz/test_flood.py`, `messaging/test_hostile_frames.py`, `messaging/test_liveness.py`; the probe in
  `test_failing_requests.py`.
* A handler raises, an unknown request, an undecodable payload: a typed error in milliseconds; no caller waits longer
  than its own deadline.
  `messaging/test_requests.py`; in a server process `test_failing_requests.py`.
* A worker dies or is stopped between PREPARE and COMMIT, or in the middle of a wire store: nothing unwritten is ever a
  hit; a stopped writer that wakes up harms nobody; the range comes back after ABORT, COMMIT or EOF.
  `test_engine_processes.py`; over the wire `wire_path/test_under_way.py`.
* A reader is stopped while it copies, and its pin expires: COMMIT_RETRIEVE says so; the engine recomputes.
  `test_readers.py`; also `wire_path/test_under_way.py`.
* The same request id with other tokens; two engines with the same request id: keys follow the content, pins follow the
  ticket.
  `server/test_requests.py`.
* Two workers of one model name with other dtype, layout, block size, LoRA or quantisation: they never see each other's
  objects; status shows both namespaces.
  `test_namespaces.py`.
* L1 is full: STORE evicts what may go, or says honestly what it dropped; what it said is stored is a hit.
  `storage/test_objects_model.py`; under load `chaos/`.
* STORE resolved, LOOKUP at once from another process: a hit, 1000 times in 1000.
  `test_readers.py`.
* 200 clients die between LOOKUP and RETRIEVE: their pins are gone at once.
  `test_crowd_dies.py`.
* The server is killed -9 and started again, quickly or slowly, under load: clients notice by boot id within 2 s,
  register again and go on; no future hangs; nothing is left behind; with an L2 tier hits are back as soon as the server
  is.
  `test_server_killed.py`; in mid-copy `client/test_hazards.py`, `devices/test_conformance_simdev.py`,
  `devices/test_copier_deaths.py`; from Redis `tiers/test_two_tiers.py`.
* An engine is killed -9 while the server copies; CANCEL while it copies: the server goes on; mappings and pins are
  released; the blocks are quiet before the answer.
  `test_engine_killed_in_mid_copy.py`, `devices/test_conformance_simdev.py`; the server's half alone in
  `server/test_server_driven.py`.
* The server is stopped under a live engine: its threads lose at most 50 ms per control call, once, then every answer is
  a miss until it is back.
  `test_server_stopped.py`; with other waits `client/test_deadlines.py`.
* Redis stalls, dies, returns, answers garbage, holds corrupt values, under 8 clients' load.
  `test_redis_under_eight_clients.py`; each kind of damage in `redis/test_tier.py` and
  `filesystem/test_disk.py`.
* 10,000 registrations, sessions, forks and aborted requests later: resident memory, descriptors, arena ranges are flat.
  `test_nothing_grows.py`.
"""
