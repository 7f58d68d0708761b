"""What drop-in modules say of the names that they lack."""

import doctest
import pickle
import re
from importlib import import_module

import pytest

from ..project.pages import ROOT

MISSING = {
    "flash_attn": ("flash_attn_func", "it has flash_attn_varlen_func, flash_attn_with_kvcache; flash_attn_varlen_func"),
    "flashinfer": ("single_decode_with_kv_cache", "it has BatchDecodeWithPagedKVCacheWrapper, "),
    "paged_minimal": ("generate", "it has CacheManager; the forward pass"),
    "torch_ops": ("gather_kv", "it has register; after register() the operators are in torch.ops.pagedkv"),
    "torch_varlen": ("varlen_attn", "it has register, require_torch; after register() import varlen_attn from"),
    "vllm": ("merge_attn_states", "it has convert_fp8, copy_blocks, "),
}


@pytest.mark.parametrize("module", MISSING)
def test_a_missing_name_says_what_there_is(module):
    name, message = MISSING[module]
    there = import_module(f"pagedkv.compat.{module}")
    expected = f"module 'pagedkv.compat.{module}' has no attribute '{name}': {message}"
    with pytest.raises(AttributeError, match=re.escape(expected)):
        getattr(there, name)
    assert not hasattr(there, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'pagedkv.compat.{module}'"):
        exec(f"from pagedkv.compat.{module} import {name}")


@pytest.mark.parametrize("module", MISSING)
def test_the_page_says_what_there_is(module):
    page = (ROOT / "docs" / "howto" / "coming-from.md").read_text()
    [row] = re.findall(rf"^\|[^|\n]*`{module}`[^|\n]* \| (`[^|\n]*) \| [^|\n]* \|$", page, re.MULTILINE)
    names, there = set(re.findall(r"`(\w+)`", row)), import_module(f"pagedkv.compat.{module}")
    with pytest.raises(AttributeError) as error:
        _ = there.nothing
    said = re.search(r": it has ([\w, ]*);", str(error.value))[1]
    assert names == {*said.split(", ")} - {"require_torch"}


@pytest.mark.parametrize("module", MISSING)
def test_tools_look_into_a_module_as_before(module):
    there, names = import_module(f"pagedkv.compat.{module}"), {}
    exec(f"from pagedkv.compat.{module} import *", names)
    own = [x for x in names.values() if getattr(x, "__module__", "").startswith(there.__name__)]
    assert own
    assert all(x is pickle.loads(pickle.dumps(x)) for x in own)
    assert doctest.DocTestFinder().find(there)
    with pytest.raises(AttributeError, match=r"has no attribute '__wrapped__'$"):
        _ = there.__wrapped__
