"""The findings of `kvframework doctor` on GPUs and their driver. In a separate process, which initialises CUDA."""

from __future__ import annotations

from collections.abc import Iterator

from kvf_cuda_ipc import CudaOptions
from kvf_cuda_ipc.driver import Driver, name_of
from kvf_cuda_ipc.gathering import compiled, source
from kvframework.api.plugin import Finding
from kvframework.errors import DeviceError


def diagnose(options: CudaOptions) -> Iterator[Finding]:
    """Make no context on any GPU; the kernel is compiled, and the result thrown away."""
    try:
        driver = Driver()
        devices = driver.devices()
    except DeviceError as error:
        yield Finding("cuda_ipc.devices", "fail", error.fact, error.hint)
        return
    if not devices:
        yield Finding(
            "cuda_ipc.devices", "fail", "this process sees no GPU", "give the server's process the engines' GPUs"
        )
        return
    for ordinal in devices:
        shown = f"{driver.model(ordinal)}, {name_of(driver.uuid(ordinal), driver.model(ordinal))}"
        shares = driver.shares_events(ordinal)
        if shares is None:
            fact = f"{shown}; the driver does not say whether it shares memory and events"
            yield Finding("cuda_ipc.devices", "warn", fact, "test it with kvframework bench gpu-report FILE")
        elif shares:
            yield Finding("cuda_ipc.devices", "ok", shown)
        else:
            yield Finding(
                "cuda_ipc.devices",
                "fail",
                f"{shown} cannot share memory and events between processes",
                "use the transport cpu_gather",
            )
    yield _copy_engines(driver, options)
    if options.engine != "dma":
        yield _kernel(driver, options)


def _copy_engines(driver: Driver, options: CudaOptions) -> Finding:
    major, minor = divmod(driver.version() // 10, 100)
    if driver.batch_copy_address():
        return Finding("cuda_ipc.copy_engines", "ok", f"the driver, of CUDA {major}.{minor}, has batched copies")
    fact = f"the driver, of CUDA {major}.{minor}, has no batched copies"
    if options.engine == "dma":
        return Finding("cuda_ipc.copy_engines", "fail", fact, "install a driver of CUDA 12.8 or later")
    return Finding(
        "cuda_ipc.copy_engines", "warn", f"{fact}, so the kernel copies everything", "install a newer driver"
    )


def _kernel(driver: Driver, options: CudaOptions) -> Finding:
    try:
        compiled(source(), "gather.cu", driver.compute_capability(0))
    except DeviceError as error:
        fact = error.fact.splitlines()[0]
        if options.engine == "kernel":
            return Finding("cuda_ipc.kernel", "fail", fact, error.hint)
        return Finding("cuda_ipc.kernel", "warn", f"{fact}, so the copy engines also copy small fragments", error.hint)
    return Finding("cuda_ipc.kernel", "ok", "NVRTC can compile the copy kernel")
