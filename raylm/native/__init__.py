"""The native CPU kernels: linear layers, paged attention and the decoder of the Llama families, in C++."""

from raylm.native import library as library
from raylm.native.build import NativeError as NativeError
from raylm.native.decoder import NativeDecoder as NativeDecoder
from raylm.native.decoder import batch_struct as batch_struct
from raylm.native.decoder import paged_attention as paged_attention
from raylm.native.kernels import kernels as kernels
from raylm.native.kernels import use_threads as use_threads
from raylm.native.linear import Int4Weight as Int4Weight
from raylm.native.linear import Int8Weight as Int8Weight
from raylm.native.linear import NativeLinear as NativeLinear
from raylm.native.linear import Weight as Weight
from raylm.native.linear import round_int4 as round_int4
from raylm.native.memory import huge_empty as huge_empty
from raylm.native.packed_adapter import AdapterRun as AdapterRun
from raylm.native.packed_adapter import PackedAdapter as PackedAdapter
