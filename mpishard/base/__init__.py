"""The ground floor: what every other room uses, and what knows no other room.

Begin with ``errors.py``, the tree of exceptions, and ``arrays.py``, one path for NumPy and CuPy.
``settings.py`` has every environment variable; ``arguments.py`` checks users' arguments;
``layout.py`` divides ranges among ranks; ``logs.py`` writes for all ranks; ``memory.py`` knows how
much memory is free. ``devices.py`` and ``kernels.py`` know GPUs, ``blas.py``, ``compilation.py``,
``bfloat16.py``, ``onednn.py`` and ``products.py`` how a processor multiplies.

Other rooms import names from here. A module is loaded when one of its names is first asked for, so
that a command line does not wait for NumPy.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.base.arguments import (
        Document,
        Metadata,
        adapter_hint,
        as_amount,
        as_count,
        as_flag,
        as_index,
        as_integer,
        as_loss,
        as_number,
        as_positive,
        check_divides,
        check_name,
        check_path,
        check_sizes,
        is_size,
        name_of,
        nearest,
        optional_package,
        require_attribute,
        require_type,
        take_plain_fields,
    )
    from mpishard.base.arrays import (
        NAMESPACES,
        RETURNED_BYTES,
        SQUARES_BLOCK,
        Array,
        Data,
        DType,
        Namespace,
        Scalar,
        address,
        array_namespace,
        as_array,
        beside,
        block_squares,
        chunk_length,
        chunks,
        copy_into,
        device_bytes,
        device_number,
        is_device_array,
        lie_end_to_end,
        lies_on_device,
        read_numbers,
        require_plain,
        return_freed_memory,
        reuse_freed_memory,
        stretched,
        synchronize,
        to_device,
        to_host,
    )
    from mpishard.base.bfloat16 import (
        BFLOAT16,
        UNIT_ROUNDOFF,
        is_bfloat16,
        round_into,
        rounded,
        scratch,
        store,
        wide,
        wide_dtype,
        widened,
        widened_dtype,
    )
    from mpishard.base.blas import better_kernel, loaded_kernel
    from mpishard.base.compilation import compile_loop, numba_module
    from mpishard.base.devices import HOST, Device, load_cupy, load_nccl
    from mpishard.base.errors import (
        CheckpointError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        CommunicationError,
        DeviceUnavailableError,
        MissingInterfaceError,
        MissingLossError,
        MissingMemberError,
        MpishardError,
        MPIUnavailableError,
        NonFiniteLossError,
        NoSampleError,
        NotInitializedError,
        OutMismatchError,
        PeerError,
        Preempted,
        ReplicaError,
        ShardingError,
        StructureOnlyError,
    )
    from mpishard.base.kernels import Kernel
    from mpishard.base.layout import LeafLayout, ShardLayout, even_sizes, even_slice
    from mpishard.base.logs import set_up_logging
    from mpishard.base.memory import (
        CGROUPS,
        OWN_CGROUP,
        available_memory,
        control_groups,
        memory_facts,
        read_text,
    )
    from mpishard.base.onednn import (
        WHEEL,
        find_library,
        library,
        processor_has_unit,
        reason_for_no_library,
        reason_for_none,
    )
    from mpishard.base.products import float32_products, multiply_float32, speeds

_MODULES = (
    "errors", "arguments", "layout", "logs", "memory", "arrays", "devices", "kernels",
    "compilation", "bfloat16", "onednn", "blas", "products",
)  # fmt: skip
"""The modules whose names are offered, in the order in which they are searched."""


def __getattr__(name: str) -> object:
    """Import a module, or a name of one, on first use."""
    # Modules come first: `from mpishard.base import settings` asks for one by this function, too.
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    for module in _MODULES:
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in found:
            # Kept, so that only the first use of a name takes this search.
            globals()[name] = found[name]
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
