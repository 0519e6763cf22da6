"""The parts of the test suite: each test file is in one. `pytest --part=NAME` collects the files of a part.

`default` is every file that no other part names; the environments of tox.ini run the parts. `test_parts.py` proves that
each part is run, and docs/testing.md says what each folder proves.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

DEFAULT = "default"

# Folders and files below tests/.
PARTS: dict[str, tuple[str, ...]] = {
    # Crowds, crashes, faults, ends and chance against real processes: slow, or waiting by design.
    "survival": (
        "api/test_copying.py",
        "api/test_helper_tier.py",
        "blend/test_model_rotary.py",
        "chaos",
        "cli/test_clear.py",
        "cli/test_demo_variants.py",
        "cli/test_dump.py",
        "cli/test_hold.py",
        "cli/test_plugins_check.py",
        "cli/test_refused_start.py",
        "cli/test_shutdown.py",
        "cli/test_status_check.py",
        "cli/test_top.py",
        "cli/test_unread_log.py",
        "client/test_deadlines.py",
        "client/test_few_resources.py",
        "client/test_hazards.py",
        "client/test_lying_server.py",
        "cuda/test_conformance.py",
        "cuda/test_guesses.py",
        "cuda/test_simulated.py",
        "cuda/test_simulated_streams.py",
        "cuda/test_transport.py",
        "devices/test_conformance_simdev.py",
        "devices/test_copier_deaths.py",
        "devices/test_copier_trouble.py",
        "devices/test_device_future.py",
        "devices/test_registration_in_doubt.py",
        "doctor/test_peers.py",
        "doctor/test_plugins.py",
        "doctor/test_redis.py",
        "doctor/test_s3.py",
        "doctor/test_storage.py",
        "events/test_paths.py",
        "events/test_restart.py",
        "fuzz",
        "keeper/test_hold.py",
        "keeper/test_hold_strangers.py",
        "keeper/test_hold_surroundings.py",
        "keeper/test_systemd_store.py",
        "observe/test_process.py",
        "observe/test_traces.py",
        "plugins/test_kvf_filesystem_capacity.py",
        "plugins/test_kvf_filesystem_faults.py",
        "plugins/test_kvf_filesystem_processes.py",
        "plugins/test_kvf_peers_conformance.py",
        "plugins/test_kvf_peers_hints.py",
        "plugins/test_kvf_redis_cluster.py",
        "plugins/test_kvf_redis_failover.py",
        "plugins/test_kvf_redis_pieces.py",
        "plugins/test_two_queues.py",
        "pricing/test_in_simulation.py",
        "restart",
        "route/test_process.py",
        "route/test_real_server.py",
        "security/test_admitted_users.py",
        "security/test_descriptors.py",
        "security/test_every_wait_ends.py",
        "security/test_slow_reader.py",
        "security/test_stranger_on_the_network.py",
        "security/test_what_is_shown.py",
        "security/test_what_one_client_may_take.py",
        "server/test_deaths.py",
        "server/test_hand_over.py",
        "server/test_l2.py",
        "shards/test_changes.py",
        "simulate/test_equal_by_policy.py",
        "simulation/test_planted.py",
        "survival",
        "tiers",
        "wire_path/test_curve.py",
        "wire_path/test_transfers.py",
        "wire_path/test_under_way.py",
        "wire_versions",
    ),
    # What operators run beside a server: Prometheus and its rules, faults as they show there, the page in a browser,
    # images, manifests, units.
    "operate": (
        "deploy",
        "observe/test_alerts.py",
        "observe/test_collectors.py",
        "observe/test_faults.py",
        "observe/test_page.py",
        "observe/test_prometheus.py",
        "observe/test_scrapers.py",
    ),
    # What authors of plugins read, copy and run: guides, examples, scaffolds, and the kits against planted bugs.
    "docs": (
        "devices/test_planted_bugs.py",
        "docs/test_architecture.py",
        "docs/test_gpu.py",
        "docs/test_layouts.py",
        "docs/test_operations.py",
        "docs/test_own_engine.py",
        "docs/test_plugin_guides.py",
        "docs/test_plugins_readme.py",
        "docs/test_requests.py",
        "docs/test_security.py",
        "docs/test_site.py",
        "docs/test_tiers.py",
        "docs/test_transports.py",
        "docs/test_tutorial.py",
        "examples",
        "inspection",
        "kits",
        "registry/test_hook_examples.py",
        "registry/test_tier_example.py",
        "registry/test_transport_example.py",
        "scaffold",
    ),
    # The S3 tier on real servers, from their wheels.
    "s3": ("s3",),
    # Engines that the other parts do without: their examples and models.
    "engines": ("engines",),
    # A trained model, from its package.
    "trained": ("trained",),
    # A real Mooncake Store, whose wheel needs libraries of the system.
    "mooncake": ("mooncake",),
    # Indexers of cache-aware routers, from their wheels.
    "routers": ("routers",),
    # Each file of requirements/ in a fresh environment.
    "packages": ("packages/test_installing.py",),
}

ROOT = Path(__file__).resolve().parent


def part_of(file: Path) -> str:
    """The part of a test file; what does not lie below tests/ is no part's and runs when it is named."""
    if not file.resolve().is_relative_to(ROOT):
        return DEFAULT
    place = PurePosixPath(file.resolve().relative_to(ROOT).as_posix())
    named = {str(place), *map(str, place.parents)}
    return next((part for part, places in PARTS.items() if named & set(places)), DEFAULT)
