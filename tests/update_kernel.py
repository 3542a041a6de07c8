"""update.cu as the host's compiler understands it: one thread after the other, with the bits of a GPU's."""

import ctypes
import hashlib
import os
import subprocess
from functools import cache

from hydra_engine.native import update
from hydra_engine.native.library import Library, _compiler
from hydra_engine.system import cache_folder

# What a GPU has around the kernel.
AROUND = """
#define __global__
#define __launch_bounds__(threads)
static struct {{ unsigned x; }} blockIdx, threadIdx;
static unsigned atomicXor(unsigned* at, unsigned bits) {{ return *at ^= bits; }}
{}
extern "C" int64_t elements_of_block() {{ return kElementsOfBlock; }}
extern "C" int64_t threads() {{ return kThreads; }}
extern "C" void launch(const Update* updates, const int64_t* ends, int32_t num_updates) {{
    for (blockIdx.x = 0; blockIdx.x < ends[num_updates - 1]; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) hydra_update(updates, ends, num_updates);
}}
"""


@cache
def compiled(source):
    """The kernel's library, without vectors; kept beside the engine's own."""
    flags = [*Library(update.SOURCE)._flags(), "-O1", "-fno-tree-vectorize"]
    text = AROUND.format(source)
    place = cache_folder() / "native" / f"gpu-{hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:16]}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_suffix(f".{os.getpid()}")
        subprocess.run([*_compiler(), *flags, "-x", "c++", "-", "-o", new], input=text, text=True, check=True)
        new.rename(place)
    return ctypes.CDLL(str(place))


def launch(library, updates, ends, num_updates):
    """Run it on arrays in DRAM."""
    library.launch(*(ctypes.c_void_p(each.data_ptr()) for each in (updates, ends)), num_updates)


def spoil(updates, ends, num_updates):
    """Change a bit of the first narrow gradient's or master's neighbour: of the first moment, or else the weight."""
    master, _, narrow, *_, moment = updates.tolist()[:7]
    place = ctypes.c_uint16.from_address(moment or master or narrow)
    place.value ^= 1
