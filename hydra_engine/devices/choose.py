"""Devices that a run uses, from what its user names, and the DRAM that suits them."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.devices.cuda import KNOWN_NAMES, CudaDevice
from hydra_engine.devices.device import DeviceSpec
from hydra_engine.devices.emulated import EmulatedDevice
from hydra_engine.devices.page_locked import PageLocked
from hydra_engine.system import HostMemory


def host_memory(devices: Sequence[DeviceSpec]) -> HostMemory:
    """Return the memory for what crosses the links of these devices."""
    first = next((device.index for device in devices if isinstance(device, CudaDevice)), None)
    return HostMemory() if first is None else PageLocked(first)


def resolve_devices(devices: Sequence[DeviceSpec | str] | None, default_bytes: int) -> list[DeviceSpec]:
    """Return the devices a run uses: those named, or else every GPU, or one emulated device of `default_bytes`."""
    if devices is None:
        return [*CudaDevice.every()] or [EmulatedDevice(default_bytes)]
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices: {devices!r} is not a list; give a list such as [EmulatedDevice(memory='64MiB')]")
    if not devices:
        raise ValueError("devices: empty list; give at least one device, or leave it out")
    resolved = [resolve_device(device) for device in devices]
    names = [device.name for device in resolved if isinstance(device, CudaDevice)]
    if names and len(names) < len(resolved):
        raise ValueError(
            f"devices: {resolved} has CUDA devices and emulated ones, whose units take other bytes; give either kind"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"devices: {name!r} is there {names.count(name)} times; name each device once")
    return resolved


def resolve_device(device: DeviceSpec | str) -> DeviceSpec:
    """Return a device, or the one of this name."""
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str):
        raise TypeError(
            f"devices: {device!r} is a {type(device).__name__}, not an EmulatedDevice, a CudaDevice or a string; "
            f"give EmulatedDevice(memory='64MiB'), or CudaDevice(0)"
        )
    named = CudaDevice.named(device)
    if named is None:
        raise ValueError(f"devices: {device!r}, known: {KNOWN_NAMES} and EmulatedDevice(memory=...)")
    return named
