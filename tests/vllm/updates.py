"""What changes the weights of a running engine besides vLLM's own `reload_weights`: an extension of its workers, and an
engine of its weight transfer. Runs in vLLM's worker processes, before they load the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class Updating:
    """A method more for vLLM's worker."""

    model_runner: Any

    def load_weights_of(self, folder: str) -> None:
        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        model.load_weights(tensors(folder))
        finalize_layerwise_reload(model, self.model_runner.model_config)


@dataclass
class Folder(WeightTransferUpdateInfo):
    folder: str


class FromFolder(WeightTransferEngine[WeightTransferInitInfo, Folder]):
    """The tensors come from a folder, as if a trainer had sent them."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = Folder

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        return

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Folder) -> None:
        self.model.load_weights(tensors(update_info.folder))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        return


def tensors(folder: str) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    for path in sorted(Path(folder).glob("*.safetensors")):
        yield from load_file(path).items()


WeightTransferEngineFactory.register_engine("kvf-test-folder", FromFolder)
