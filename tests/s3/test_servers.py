"""The S3 tier against real servers: SeaweedFS and, beside it, moto and Azurite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from kvf_dev.testing import FaultProxy
from kvf_dev.testing.tier import TierConformance
from kvf_dev.testing.tier.contract import ContractTests
from kvframework.api.tier import Tier
from tests.support.s3_server import BUCKET, AzureServer, MotoServer, S3Server, SeaweedServer
from tests.support.s3_tier import open_s3_tier, write_credentials

pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_credentials(tmp_path_factory.mktemp("credentials") / "credentials"))


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedServer(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    server = AzureServer(tmp_path_factory.mktemp("azurite"))
    with server:
        yield server


class TestOnSeaweed(TierConformance):
    use = "s3"
    patience_s = 60.0
    time_step_s = 1.0
    examples = 20

    @pytest.fixture
    def tier_options(self, weed: S3Server, credentials: str) -> Mapping[str, object]:
        url = f"s3://{BUCKET}/kit"
        return {"url": url, "endpoint": weed.endpoint, "credentials_file": credentials, "concurrency": 32}

    @pytest.fixture
    def faulty_tier(self, weed: S3Server, credentials: str) -> Iterator[tuple[Tier, FaultProxy]]:
        with FaultProxy(("127.0.0.1", weed.port)) as proxy:
            tier = open_s3_tier(f"http://127.0.0.1:{proxy.port}", credentials_file=credentials)
            yield tier, proxy
            tier.close()


class TestOnMoto(ContractTests):
    """What another server may do in another way."""

    use = "s3"
    patience_s = 60.0
    time_step_s = 1.0

    @pytest.fixture
    def tier_options(self, moto: S3Server, credentials: str) -> Mapping[str, object]:
        return {"url": f"s3://{BUCKET}/kit", "endpoint": moto.endpoint, "credentials_file": credentials}


class TestOnAzurite(ContractTests):
    use = "s3"
    patience_s = 60.0
    time_step_s = 1.0

    @pytest.fixture
    def tier_options(self, azurite: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, object]:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.KEY)
        return {"url": f"az://{azurite.ACCOUNT}/{azurite.CONTAINER}/kit", "endpoint": azurite.endpoint}
