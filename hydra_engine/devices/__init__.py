"""Hardware with a budget and lanes: GPUs, emulated devices, their rates."""

from hydra_engine.devices.arena import ArenaInPieces, Slab
from hydra_engine.devices.budget import SLABS, Ledger, Residents, Ticket
from hydra_engine.devices.cuda import AUTOCAST_KINDS, CudaDevice, active_autocast
from hydra_engine.devices.device import DeviceGenerator, DeviceSpec, OpenDevice, Timer
from hydra_engine.devices.emulated import EmulatedDevice
from hydra_engine.devices.lanes import COMPUTE, INPUT, LOAD, STORE, Promise
from hydra_engine.devices.pool import DevicePool, PoolLimits, Quotas, host_memory, resolve_device, resolve_devices
from hydra_engine.devices.rates import STATED, Ceilings
from hydra_engine.devices.watcher import FreeGpus, GpuWatcher
