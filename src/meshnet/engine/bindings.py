"""llama.cpp's C API through ctypes: the structs and the functions that the engine calls, and nothing else.

Layouts are those of one release (see `library.KNOWN`); `library` compares their defaults with known values
before anything is loaded, because a struct that moved by four bytes fails in ways nobody can read.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
ProgressCallback = c.CFUNCTYPE(c.c_bool, c.c_float, c.c_void_p)
EvalCallback = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)


class ModelParams(c.Structure):
    """`llama_model_params`, 80 bytes."""

    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int),
        ("load_mode", c.c_int),
        ("lazy_mode", c.c_int),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    )


class ContextParams(c.Structure):
    """`llama_context_params`, 168 bytes."""

    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int),
        ("rope_scaling_type", c.c_int),
        ("pooling_type", c.c_int),
        ("attention_type", c.c_int),
        ("flash_attn_type", c.c_int),
        ("rope_and_yarn", c.c_float * 6),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int),
        ("type_v", c.c_int),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("reserved", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class ContextParamsShort(c.Structure):
    """`llama_context_params` of builds without the further pointer, 160 bytes."""

    _fields_ = tuple(each for each in ContextParams._fields_ if each[0] != "reserved")


class Batch(c.Structure):
    """`llama_batch`; addresses as plain integers, so that numpy's can be put in."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.c_void_p),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.c_void_p),
    )


class TokenData(c.Structure):
    """`llama_token_data`."""

    _fields_ = (("id", c.c_int32), ("logit", c.c_float), ("p", c.c_float))


class TokenDataArray(c.Structure):
    """`llama_token_data_array`."""

    _fields_ = (
        ("data", c.c_void_p),
        ("size", c.c_size_t),
        ("selected", c.c_int64),
        ("sorted", c.c_bool),
    )


_POINTER, _INT, _BOOL, _SIZE = c.c_void_p, c.c_int32, c.c_bool, c.c_size_t

# name -> (result, arguments)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_POINTER, _POINTER)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (_POINTER, (c.c_char_p, ModelParams)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_init_from_model": (_POINTER, (_POINTER, ContextParams)),
    "llama_free": (None, (_POINTER,)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_model_n_embd": (_INT, (_POINTER,)),
    "llama_model_n_layer": (_INT, (_POINTER,)),
    "llama_model_size": (c.c_uint64, (_POINTER,)),
    "llama_model_is_recurrent": (_BOOL, (_POINTER,)),
    "llama_model_is_hybrid": (_BOOL, (_POINTER,)),
    "llama_n_ctx_seq": (c.c_uint32, (_POINTER,)),
    "llama_decode": (_INT, (_POINTER, Batch)),
    "llama_synchronize": (None, (_POINTER,)),
    "llama_set_embeddings": (None, (_POINTER, _BOOL)),
    "llama_set_n_threads": (None, (_POINTER, _INT, _INT)),
    "llama_get_logits_ith": (_POINTER, (_POINTER, _INT)),
    "llama_memory_clear": (None, (_POINTER, _BOOL)),
    "llama_memory_seq_rm": (_BOOL, (_POINTER, _INT, _INT, _INT)),
    "llama_memory_seq_cp": (None, (_POINTER, _INT, _INT, _INT, _INT)),
    "llama_memory_seq_pos_max": (_INT, (_POINTER, _INT)),
    "llama_state_seq_get_size_ext": (_SIZE, (_POINTER, _INT, c.c_uint32)),
    "llama_state_seq_get_data_ext": (_SIZE, (_POINTER, _POINTER, _SIZE, _INT, c.c_uint32)),
    "llama_state_seq_set_data_ext": (_SIZE, (_POINTER, _POINTER, _SIZE, _INT, c.c_uint32)),
    "llama_vocab_type": (_INT, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_vocab_is_eog": (_BOOL, (_POINTER, _INT)),
    "llama_vocab_is_control": (_BOOL, (_POINTER, _INT)),
    "llama_vocab_bos": (_INT, (_POINTER,)),
    "llama_vocab_eos": (_INT, (_POINTER,)),
    "llama_vocab_get_add_bos": (_BOOL, (_POINTER,)),
    "llama_tokenize": (_INT, (_POINTER, c.c_char_p, _INT, _POINTER, _INT, _BOOL, _BOOL)),
    "llama_token_to_piece": (_INT, (_POINTER, _INT, _POINTER, _INT, _INT, _BOOL)),
    "llama_sampler_init_grammar": (_POINTER, (_POINTER, c.c_char_p, c.c_char_p)),
    "llama_sampler_apply": (None, (_POINTER, c.POINTER(TokenDataArray))),
    "llama_sampler_accept": (None, (_POINTER, _INT)),
    "llama_sampler_clone": (_POINTER, (_POINTER,)),
    "llama_sampler_reset": (None, (_POINTER,)),
    "llama_sampler_free": (None, (_POINTER,)),
    "llama_print_system_info": (c.c_char_p, ()),
    "llama_supports_gpu_offload": (_BOOL, ()),
    "ggml_get_name": (c.c_char_p, (_POINTER,)),
    "ggml_nbytes": (_SIZE, (_POINTER,)),
    "ggml_backend_tensor_get": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_backend_dev_count": (_SIZE, ()),
    "ggml_backend_dev_get": (_POINTER, (_SIZE,)),
    "ggml_backend_dev_name": (c.c_char_p, (_POINTER,)),
    "ggml_backend_dev_description": (c.c_char_p, (_POINTER,)),
    "ggml_backend_dev_type": (_INT, (_POINTER,)),
    "ggml_backend_dev_memory": (None, (_POINTER, c.POINTER(_SIZE), c.POINTER(_SIZE))),
}

# Wanted, but done without where a build does not export them. The first is llama_context::get_sched() const.
OPTIONAL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "_ZNK13llama_context9get_schedEv": (_POINTER, (_POINTER,)),
    "ggml_backend_sched_get_n_backends": (_INT, (_POINTER,)),
    "ggml_backend_sched_get_backend": (_POINTER, (_POINTER, _INT)),
    "ggml_backend_is_cpu": (_BOOL, (_POINTER,)),
    "ggml_backend_cpu_set_use_ref": (None, (_POINTER, _BOOL)),
}


def bind(handle: c.CDLL, context: type[c.Structure] = ContextParams) -> list[str]:
    """Give every function its prototype; returns the names of those that are missing and not optional.

    `context` is the layout of a context's parameters in this build.
    """
    missing = []
    for name, (result, arguments) in [*FUNCTIONS.items(), *OPTIONAL.items()]:
        try:
            function = getattr(handle, name)
        except AttributeError:
            if name in FUNCTIONS:
                missing.append(name)
            continue
        function.restype = context if result is ContextParams else result
        function.argtypes = tuple(context if each is ContextParams else each for each in arguments)
    return missing
