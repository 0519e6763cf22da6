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
        "blend/test_model_rotary.py",
        "core/api/test_copying.py",
        "core/api/test_helper_tier.py",
        "core/chaos",
        "core/cli/test_hold.py",
        "core/cli/test_refused_start.py",
        "core/cli/test_shutdown.py",
        "core/cli/test_unread_log.py",
        "core/client/test_deadlines.py",
        "core/client/test_few_resources.py",
        "core/client/test_hazards.py",
        "core/client/test_lying_server.py",
        "core/defaults/test_two_queues.py",
        "core/doctor/test_plugins.py",
        "core/doctor/test_storage.py",
        "core/fuzz",
        "core/keeper/test_hold.py",
        "core/keeper/test_hold_strangers.py",
        "core/keeper/test_systemd_store.py",
        "core/restart",
        "core/security/test_admitted_users.py",
        "core/security/test_descriptors.py",
        "core/security/test_every_wait_ends.py",
        "core/security/test_slow_reader.py",
        "core/security/test_stranger_on_the_network.py",
        "core/security/test_what_is_shown.py",
        "core/security/test_what_one_client_may_take.py",
        "core/server/test_hand_over.py",
        "core/shards/test_changes.py",
        "core/survival",
        "core/tiers",
        "core/wire_path/test_curve.py",
        "core/wire_path/test_transfers.py",
        "core/wire_path/test_under_way.py",
        "core/wire_versions",
        "cuda/test_conformance.py",
        "cuda/test_guesses.py",
        "cuda/test_simulated.py",
        "demo/test_variants.py",
        "devices/test_conformance_simdev.py",
        "devices/test_copier_deaths.py",
        "devices/test_copier_frames.py",
        "devices/test_copier_trouble.py",
        "devices/test_device_future.py",
        "devices/test_registration_in_doubt.py",
        "dev/test_plugins_check.py",
        "events/test_paths.py",
        "events/test_restart.py",
        "filesystem/test_capacity.py",
        "filesystem/test_disk.py",
        "filesystem/test_faults.py",
        "filesystem/test_processes.py",
        "observe/test_clear.py",
        "observe/test_dump.py",
        "observe/test_process.py",
        "observe/test_top.py",
        "observe/test_traces.py",
        "peers/test_conformance.py",
        "peers/test_nodes.py",
        "plan/simulate/test_equal_by_policy.py",
        "plan/simulation/test_planted.py",
        "plan/test_pricing.py",
        "plan/test_tiers_command.py",
        "redis/test_cluster.py",
        "redis/test_doctor.py",
        "redis/test_failover.py",
        "route/test_process.py",
        "route/test_real_server.py",
        "run/test_run.py",
        "s3/test_doctor.py",
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
    ),
    # What authors of plugins read, copy and run: guides, examples, scaffolds, and the kits against planted bugs.
    "docs": (
        "dev/inspection",
        "dev/kits",
        "dev/scaffold",
        "devices/test_planted_bugs.py",
        "docs/test_architecture.py",
        "docs/test_own_engine.py",
        "docs/test_plugin_guides.py",
        "docs/test_requests.py",
        "docs/test_security.py",
        "docs/test_site.py",
        "docs/test_transports.py",
        "docs/test_tutorial.py",
        "examples/test_distributions.py",
        "examples/test_examples.py",
        "examples/test_fleet.py",
        "examples/test_routing.py",
    ),
    # The S3 tier on real servers, from their wheels.
    "s3": ("s3/test_faults.py", "s3/test_servers.py"),
    # Engines that the other parts do without: their examples and models.
    "engines": ("examples/test_engine_examples.py", "transformers/test_processes.py", "transformers/test_soak.py"),
    # A trained model, from its package.
    "trained": ("demo/trained",),
    # A real Mooncake Store, whose wheel needs libraries of the system.
    "mooncake": ("mooncake/real",),
    # Indexers of cache-aware routers, from their wheels.
    "routers": ("route/routers",),
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
