"""The examples for engines without first-party support, as installed, in the engines themselves where they are there.

Each example's own tests run once; a test here is a row of the table of engines, and names those that prove it.
"""

from __future__ import annotations

import importlib.util
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.wheels import install_wheels, run_own_tests

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# By example: the modules without which its engine is not there.
ENGINES = {"kvf-llamacpp": ("xllamacpp", "gguf"), "kvf-mlx": ("mlx", "mlx_lm"), "kvf-tensorrt-llm": ()}
# Engines start many times.
TIMEOUT_S = 900.0
Results = Callable[[str], dict[str, bool]]

LLAMA = ("llama.cpp", "kvf-llamacpp")
MLX = ("MLX", "kvf-mlx")
TRT = ("TensorRT-LLM", "kvf-tensorrt-llm")
PROOFS = [
    (
        LLAMA,
        "new process",
        "tested",
        ["test_a_new_server_goes_on_from_what_another", "test_other_kv_gives_other_tokens"],
    ),
    (LLAMA, "other prompts", "tested", ["test_a_new_server_goes_on_from_what_another"]),
    (LLAMA, "LoRA", "refused", ["test_while_an_adapter_is_on_nothing_is_named"]),
    (LLAMA, "quantised caches", "refused", ["test_any_other_form_is_refused"]),
    (LLAMA, "no server", "tested", ["test_without_kvframework_the_server_answers"]),
    (MLX, "new process", "tested", ["test_a_new_process_goes_on_from_what_another"]),
    (MLX, "hybrid models", "tested", ["test_a_new_process_goes_on_from_what_another"]),
    (MLX, "other prompts", "tested", ["test_a_prefix_is_restored_for_another_prompt"]),
    (MLX, "sliding windows", "refused", ["test_caches_of_other_kinds_are_refused"]),
    (MLX, "no server", "tested", ["test_without_a_server_it_is_mlx_lms_own_cache"]),
    (TRT, "new process", "stand-ins", ["test_another_engine_loads_what_was_computed"]),
    (TRT, "chunked prefill", "stand-ins", ["test_another_engine_loads_what_was_computed"]),
    (TRT, "other prompts", "stand-ins", ["test_generated_tokens_are_stored_too"]),
    (TRT, "LoRA", "refused, stand-ins", ["test_tenants_adapters_and_images_share_nothing"]),
    (TRT, "images", "refused, stand-ins", ["test_tenants_adapters_and_images_share_nothing"]),
    (TRT, "tenants", "stand-ins", ["test_tenants_adapters_and_images_share_nothing"]),
    (TRT, "pipeline parallel", "refused, stand-ins", ["test_what_cannot_be_named_is_refused"]),
    (TRT, "no server", "stand-ins", ["test_without_a_server_everything_is_computed"]),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of an example's own tests: whether each passed."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ENGINES:
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    install_wheels([folder / name for name in ENGINES], folder / "site")
    found: dict[str, dict[str, bool]] = {}

    def of(name: str) -> dict[str, bool]:
        if name not in found:
            shutil.rmtree(folder / name / name.replace("-", "_"))
            file = folder / f"{name}.xml"
            done = run_own_tests(folder / name, folder / "site", "-q", f"--junitxml={file}", timeout_s=TIMEOUT_S)
            assert done.returncode == 0, done.stdout + done.stderr
            cases = ElementTree.parse(file).iter("testcase")
            found[name] = {str(case.get("name")): not len(case) for case in cases}
        return found[name]

    return of


@pytest.mark.torch
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("example", "names"),
    [
        pytest.param(example, names, id=f"{engine}, {feature}", marks=pytest.mark.engine_feature(engine, feature, how))
        for (engine, example), feature, how, names in PROOFS
    ],
)
def test_a_row_is_proven_by_the_examples_own_tests(results: Results, example: str, names: list[str]) -> None:
    missing = [module for module in ENGINES[example] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; the tox environment is `engines`")
    passed = results(example)
    for name in names:
        mine = {test: outcome for test, outcome in passed.items() if test.startswith(name)}
        assert mine, name
        assert all(mine.values()), mine


def test_every_engine_is_there_once_to_be_proven() -> None:
    assert set(ENGINES) == {example for (_, example), *_ in PROOFS}
