"""Architectures of `transformers`: tiny configurations with a random state, two layers each, dropout on."""

import copy
from functools import partial

import torch
import transformers
from torch.nn import functional as F

from tests.any_model.harness import Case

transformers.utils.logging.set_verbosity_error()  # it says that kernels for GPUs are not installed

VOCABULARY, PAD, BOS, EOS = 64, 2, 0, 1
CLASSES = 3
IGNORED = -100
DROPOUT = 0.1

# Samples, length of a sequence, whether some of it is padding.
TRAINING = ((4, 9, False), (4, 9, True), (3, 12, True))
VALIDATION = ((2, 7, False), (3, 9, True))

TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYERS = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2}
ENCODER = TOKENS | SIZES | {"max_position_embeddings": 32}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
MULTI_HEAD = ENCODER | {"num_key_value_heads": 4}
PAIR = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
}
T5 = TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": BOS}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
WINDOW = {"sliding_window": 5}
GEMMA2 = DECODER | WINDOW | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2}
PIXELS = 16
IMAGE = SIZES | {"image_size": PIXELS, "patch_size": 4, "num_labels": CLASSES}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
SPEECH_CLASSES = {"num_labels": CLASSES, "classifier_proj_size": 16}
SPEECH = SIZES | TOKENS | CONVOLUTIONS | SPEECH_CLASSES
SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
SPEECH |= {"apply_spec_augment": False, "layerdrop": 0.0}  # the first draws from NumPy


# ---- data: (samples, length, is padded, generator) -> (inputs, target)


def _ids_and_mask(samples, length, padded, generator):
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(1, samples):
            mask[row, length - row :] = 0
        ids = ids.masked_fill(mask == 0, PAD)
    return ids, mask


def tokens(*spec, names=("input_ids", "attention_mask")):
    ids, mask = _ids_and_mask(*spec)
    return dict(zip(names, (ids, mask), strict=True)), ids.masked_fill(mask == 0, IGNORED)


def pair_of_tokens(samples, length, padded, generator):
    """An encoder's input, and labels of another length."""
    inputs, _ = tokens(samples, length, padded, generator)
    _, target = tokens(samples, length - 2, padded, generator)
    return inputs, target


def decoder_tokens(samples, length, padded, generator):
    """The same, with the decoder's input in the batch."""
    inputs, target = pair_of_tokens(samples, length, padded, generator)
    inputs["decoder_input_ids"] = F.pad(target.masked_fill(target == IGNORED, PAD)[:, :-1], (1, 0), value=BOS)
    return inputs, target


def sentence(samples, length, padded, generator):
    inputs, _ = tokens(samples, length, padded, generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def words(samples, length, padded, generator):
    inputs, target = tokens(samples, length, padded, generator)
    return inputs, (target % CLASSES).masked_fill(target == IGNORED, IGNORED)


def spans(samples, length, padded, generator):
    inputs, _ = tokens(samples, length, padded, generator)
    return inputs, torch.randint(length - samples, (samples, 2), generator=generator)


def images(samples, length, padded, generator, *, pixels=PIXELS, resizes=False, channels=3):
    """Pixels; larger in the longer batch where the model takes that."""
    side = 2 * pixels if resizes and length > 9 else pixels
    inputs = {"pixel_values": torch.randn(samples, channels, side, side, generator=generator)}
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def image_and_text(samples, length, padded, generator):
    inputs, _ = tokens(samples, length, padded, generator)
    inputs["input_ids"][:, 4] = EOS
    inputs |= images(samples, length, padded, generator)[0]
    return inputs, torch.arange(samples)


def spectrogram(samples, length, padded, generator):
    """Whisper's: of one length."""
    _, target = tokens(samples, length, padded, generator)
    return {"input_features": torch.randn(samples, 8, 32, generator=generator)}, target


def recording(samples, length, padded, generator):
    inputs, _ = spectrogram(samples, length, padded, generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def segments(samples, length, padded, generator):
    inputs, _ = images(samples, length, padded, generator)
    return inputs, torch.randint(CLASSES, (samples, PIXELS, PIXELS), generator=generator)


def wave(samples, length, padded, generator):
    inputs = {"input_values": torch.randn(samples, 40 * length, generator=generator)}
    mask = torch.ones(samples, 40 * length, dtype=torch.long)
    if padded:
        mask[1:, 38 * length :] = 0
    return inputs | {"attention_mask": mask}, torch.randint(CLASSES, (samples,), generator=generator)


def spoken(samples, length, padded, generator):
    inputs, _ = wave(samples, length, padded, generator)
    return inputs, torch.randint(3, VOCABULARY, (samples, 3), generator=generator)


def series(samples, length, padded, generator):
    past = torch.randn(samples, 12, 2, generator=generator)
    return {"past_values": past}, torch.randn(samples, 4, 2, generator=generator)


# ---- losses: (the forward's output, target) -> scalar


def own_loss(output, target):
    return output.loss


def next_token_loss(output, target):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=IGNORED)


def class_loss(output, target):
    """Of logits with a class per sample, token or pixel."""
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def hidden_loss(output, target):
    """Of a model without a head: its hidden width serves as classes."""
    hidden = output.last_hidden_state
    if hidden.dim() == 4:
        hidden = hidden.flatten(2).transpose(1, 2)
    if hidden.shape[:2] != target.shape:
        hidden, target = hidden.mean(1), target.flatten()[: len(hidden)]
    return F.cross_entropy(hidden.flatten(0, -2), (target % hidden.shape[-1]).flatten())


def span_loss(output, target):
    return F.cross_entropy(output.start_logits, target[:, 0]) + F.cross_entropy(output.end_logits, target[:, 1])


def contrast_loss(output, target):
    return F.cross_entropy(output.logits_per_image, target) + F.cross_entropy(output.logits_per_text, target)


# ---- what becomes of the target: labels in the batch, or not


def labels(inputs, target):
    return inputs | {"labels": target}


def positions(inputs, target):
    return inputs | {"start_positions": target[:, 0], "end_positions": target[:, 1]}


def return_loss(inputs, target):
    return inputs | {"return_loss": True}


def future(inputs, target):
    return inputs | {"future_values": target}


# ---- cases


def with_dropout(config):
    """Set each dropout probability of a configuration and of those within it, but none for whole layers."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            with_dropout(value)
        elif "drop" in name and "layerdrop" not in name and type(value) is float:
            setattr(config, name, DROPOUT)
    return config


def new_model(model, config, values):
    options = copy.deepcopy(values)
    attention = options.pop("attention", None)
    kwargs = {} if attention is None else {"attn_implementation": attention}
    configuration = with_dropout(getattr(transformers, config)(**options))
    return getattr(transformers, model)._from_config(configuration, **kwargs)


def batches(data, join, specs, seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for spec in specs:
        inputs, target = data(*spec, generator)
        found.append((inputs if join is None else join(inputs, target), target))
    return found


def case(
    name, model, config, values, data=tokens, loss_fn=None, join=None, *, training=TRAINING, validation=VALIDATION
):
    """One row: with no loss of its own, the model gets the target with its inputs and computes the loss itself."""
    if loss_fn is None:
        loss_fn, join = own_loss, join or labels
    return Case(
        name,
        partial(new_model, model, config, values),
        partial(batches, data, join, training, 2),
        partial(batches, data, join, validation, 3),
        loss_fn,
        is_listed=False,
    )


def causal(name, prefix, values, *, config=None, model=None):
    """A causal model with the labels in the batch, and by its logits."""
    config, model = config or f"{prefix}Config", model or f"{prefix}ForCausalLM"
    return [
        case(name, model, config, values),
        case(f"{name}, logits", model, config, values, tokens, next_token_loss),
    ]


def masked(name, prefix, values):
    """A masked language model, and the same without a head."""
    config = f"{prefix}Config"
    return [
        case(name, f"{prefix}ForMaskedLM", config, values),
        case(f"{name}, no head", f"{prefix}Model", config, values, tokens, hidden_loss),
    ]


def heads(name, prefix, values):
    """Sequence and token classification, and question answering: labels in the batch, without them, and with both."""
    config = f"{prefix}Config"
    classes = values | {"num_labels": CLASSES}
    answers = f"{prefix}ForQuestionAnswering"
    return [
        case(f"{name}, sequences", f"{prefix}ForSequenceClassification", config, classes, sentence),
        case(f"{name}, tokens", f"{prefix}ForTokenClassification", config, classes, words, class_loss),
        case(f"{name}, questions", answers, config, values, spans, own_loss, positions),
        case(f"{name}, questions, logits", answers, config, values, spans, span_loss),
    ]


def encoder_decoder(name, prefix, values):
    """With labels in the batch, and with the decoder's input there instead."""
    config, model = f"{prefix}Config", f"{prefix}ForConditionalGeneration"
    return [
        case(name, model, config, values, pair_of_tokens),
        case(f"{name}, logits", model, config, values, decoder_tokens, class_loss),
    ]


def vision(name, prefix, values, *, resizes=False, pixels=PIXELS):
    config, model = f"{prefix}Config", f"{prefix}ForImageClassification"
    data = partial(images, resizes=resizes, pixels=pixels)
    return [
        case(name, model, config, values, data),
        case(f"{name}, logits", model, config, values, data, class_loss),
    ]


GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT_NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}
GPT_NEO |= TOKENS | {"hidden_size": 32, "max_position_embeddings": 32}
OPT = ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32}
GPTJ = GPT2 | {"rotary_dim": 4}
PHI = MULTI_HEAD | {"partial_rotary_factor": 0.5}
MIXTRAL = DECODER | EXPERTS | {"num_local_experts": 4}
QWEN3_MOE = DECODER | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
QWEN2_MOE = QWEN3_MOE | {"shared_expert_intermediate_size": 24}
GRANITE = DECODER | {
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
ROBERTA = ENCODER | {"max_position_embeddings": 40}
DISTILBERT = TOKENS | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
DEBERTA = ENCODER | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
ALBERT = ENCODER | {"embedding_size": 16}
WHISPER = PAIR | {
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
SIGLIP = {"text_config": ENCODER, "vision_config": SIZES | {"image_size": PIXELS, "patch_size": 4}}
CLIP = SIGLIP | {"projection_dim": 16}
SWIN = {
    "image_size": PIXELS,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": CLASSES,
}
CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": CLASSES}
MAMBA = LAYERS | {"state_size": 4, "time_step_rank": 4}
BERT, VIT = ENCODER, IMAGE
QWEN2 = DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": True}

MUST_TRAIN = [
    *encoder_decoder("T5", "T5", T5),
    *encoder_decoder("BART", "Bart", PAIR),
    case("Whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, spectrogram),
    *causal("OPT", "OPT", OPT),
    *causal("GPT-NeoX", "GPTNeoX", ENCODER),
    *causal("GPT-J", "GPTJ", GPTJ),
    *causal("Falcon", "Falcon", ENCODER),
    *causal("Phi", "Phi", PHI),
    *causal("Phi-3", "Phi3", DECODER),
    *causal("Mixtral", "Mixtral", MIXTRAL),
    *causal("Qwen2-MoE", "Qwen2Moe", QWEN2_MOE),
    *causal("Granite", "Granite", GRANITE),
    *causal("OLMo-2", "Olmo2", DECODER),
    *causal("StarCoder2", "Starcoder2", DECODER),
    *causal("StableLM", "StableLm", MULTI_HEAD),
    *causal("SmolLM3", "SmolLM3", DECODER),
    *masked("RoBERTa", "Roberta", ROBERTA),
    *masked("DistilBERT", "DistilBert", DISTILBERT),
    *masked("DeBERTa-v2", "DebertaV2", DEBERTA),
    *masked("ALBERT", "Albert", ALBERT),
    *masked("ELECTRA", "Electra", ALBERT),
    case("CLIP", "CLIPModel", "CLIPConfig", CLIP, image_and_text, own_loss, return_loss),
    case("CLIP, logits", "CLIPModel", "CLIPConfig", CLIP, image_and_text, contrast_loss),
    *vision("Swin", "Swin", SWIN),
    *vision("DINOv2", "Dinov2", VIT, resizes=True),
    *vision("ConvNeXt", "ConvNext", CONVNEXT, resizes=True, pixels=32),
    *causal("Mamba", "Mamba", MAMBA),
    *heads("BERT", "Bert", BERT),
    *heads("RoBERTa", "Roberta", ROBERTA),
    *heads("DistilBERT", "DistilBert", DISTILBERT),
]

LISTED = [each._replace(is_listed=True) for each in MUST_TRAIN]

# The families that had layers coded by hand.
BY_HAND = [
    *causal("GPT-2", "GPT2", GPT2, model="GPT2LMHeadModel"),
    *causal("Llama", "Llama", DECODER),
    *causal("Mistral", "Mistral", DECODER | WINDOW),
    *causal("Qwen2", "Qwen2", QWEN2),
    *causal("Qwen3", "Qwen3", DECODER),
    *causal("Gemma", "Gemma", DECODER),
    *causal("Gemma 2", "Gemma2", GEMMA2),
    *causal("Gemma 3", "Gemma3", GEMMA2, config="Gemma3TextConfig"),
    *masked("BERT", "Bert", BERT),
    *vision("ViT", "ViT", VIT),
]

SWITCH = T5 | {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
MARIAN = PAIR | {"decoder_vocab_size": VOCABULARY}
GPT_OSS = MIXTRAL | WINDOW | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
OLMOE = DECODER | EXPERTS | {"num_experts": 4}
DEEPSEEK_V3 = MULTI_HEAD | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
JETMOE = LAYERS | {
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
JAMBA_LAYERS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
JAMBA_MAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
JAMBA = DECODER | EXPERTS | JAMBA_LAYERS | JAMBA_MAMBA | {"num_experts": 2}
MAMBA2 = LAYERS | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
RWKV = LAYERS | {"attention_hidden_size": 32, "intermediate_size": 48}
LONGFORMER = ENCODER | {"attention_window": 4, "max_position_embeddings": 40}
BIG_BIRD = ENCODER | {"attention_type": "original_full"}
XGLM = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 32}
XLNET = TOKENS | {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
BLIP = CLIP | {"image_text_hidden_size": 16}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "num_labels": CLASSES,
}
VIT_MAE = IMAGE | {
    "decoder_hidden_size": 16,
    "decoder_intermediate_size": 24,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 4,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES}
MOBILENET = {"num_labels": CLASSES, "image_size": 32, "depth_multiplier": 0.25}
POOLFORMER = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_labels": CLASSES}
PATCH_TST = {
    "num_input_channels": 2,
    "context_length": 12,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 2,
    "d_model": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "loss": "mse",
}

OTHERS = [
    case("Marian", "MarianMTModel", "MarianConfig", MARIAN, pair_of_tokens),
    *encoder_decoder("Pegasus", "Pegasus", PAIR),
    *encoder_decoder("M2M-100", "M2M100", PAIR),
    *encoder_decoder("mBART", "MBart", PAIR),
    *encoder_decoder("mT5", "MT5", T5),
    *encoder_decoder("UMT5", "UMT5", T5),
    *encoder_decoder("LongT5", "LongT5", T5 | {"local_radius": 3}),
    *encoder_decoder("Blenderbot", "Blenderbot", PAIR),
    *encoder_decoder("Switch Transformers", "SwitchTransformers", SWITCH),
    *masked("XLM-R", "XLMRoberta", ROBERTA),
    *masked("CamemBERT", "Camembert", ROBERTA),
    *masked("MPNet", "MPNet", ROBERTA),
    *masked("Longformer", "Longformer", LONGFORMER),
    *masked("BigBird", "BigBird", BIG_BIRD),
    *masked("DeBERTa", "Deberta", DEBERTA),
    *masked("ModernBERT", "ModernBert", ENCODER | {"local_attention": 4}),
    *masked("ESM", "Esm", ROBERTA | {"mask_token_id": 3}),
    *masked("FNet", "FNet", ENCODER)[:1],
    *masked("ConvBERT", "ConvBert", ALBERT),
    *masked("SqueezeBERT", "SqueezeBert", ALBERT | {"embedding_size": 32}),
    *masked("RoFormer", "RoFormer", ALBERT),
    *heads("XLNet", "XLNet", XLNET)[:2],
    *heads("DeBERTa-v2", "DebertaV2", DEBERTA),
    *heads("ALBERT", "Albert", ALBERT),
    *heads("ELECTRA", "Electra", ALBERT),
    *heads("ModernBERT", "ModernBert", ENCODER | {"local_attention": 4})[:2],
    *heads("Llama", "Llama", DECODER),
    *heads("GPT-2", "GPT2", GPT2),
    *heads("Mistral", "Mistral", DECODER),
    *causal("Bloom", "Bloom", TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    *causal("Cohere", "Cohere", DECODER),
    *causal("Cohere 2", "Cohere2", DECODER | WINDOW),
    *causal("GPT-Neo", "GPTNeo", GPT_NEO),
    *causal("CodeGen", "CodeGen", GPTJ),
    *causal("MPT", "Mpt", TOKENS | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}),
    *causal("OLMo", "Olmo", DECODER),
    *causal("OLMo-3", "Olmo3", DECODER | WINDOW),
    *causal("GLM", "Glm", DECODER),
    *causal("GLM-4", "Glm4", DECODER),
    *causal("Nemotron", "Nemotron", DECODER),
    *causal("Exaone 4", "Exaone4", DECODER | WINDOW),
    *causal("Granite MoE", "GraniteMoe", MIXTRAL),
    *causal("Qwen3-MoE", "Qwen3Moe", QWEN3_MOE),
    *causal("OLMoE", "Olmoe", OLMOE),
    *causal("PhiMoE", "Phimoe", MIXTRAL),
    *causal("GPT-OSS", "GptOss", GPT_OSS),
    *causal("DeepSeek-V2", "DeepseekV2", DEEPSEEK_V2),
    *causal("DeepSeek-V3", "DeepseekV3", DEEPSEEK_V3),
    *causal("JetMoE", "JetMoe", JETMOE),
    *causal("Jamba", "Jamba", JAMBA),
    *causal("Mamba 2", "Mamba2", MAMBA2),
    *causal("Falcon Mamba", "FalconMamba", MAMBA),
    *causal("RWKV", "Rwkv", RWKV),
    *causal("XGLM", "XGLM", TOKENS | XGLM),
    *causal("BioGPT", "BioGpt", ENCODER),
    *causal("CTRL", "CTRL", GPT2 | {"dff": 48}, model="CTRLLMHeadModel"),
    *causal("GPT", "OpenAIGPT", GPT2, model="OpenAIGPTLMHeadModel"),
    *causal("GPT BigCode", "GPTBigCode", GPT2),
    *causal("Persimmon", "Persimmon", MULTI_HEAD),
    *causal("BitNet", "BitNet", DECODER),
    *causal("Helium", "Helium", DECODER),
    *causal("LFM2", "Lfm2", DECODER | {"layer_types": ["conv", "full_attention"]}),
    case("SigLIP", "SiglipModel", "SiglipConfig", SIGLIP, image_and_text, own_loss, return_loss),
    case("BLIP", "BlipModel", "BlipConfig", BLIP, image_and_text, own_loss, return_loss),
    case("ChineseCLIP", "ChineseCLIPModel", "ChineseCLIPConfig", CLIP, image_and_text, own_loss, return_loss),
    *vision("CLIP, images", "CLIP", CLIP | {"num_labels": CLASSES})[1:],
    *vision("BEiT", "Beit", VIT | {"use_relative_position_bias": True}),
    *vision("DeiT", "DeiT", VIT),
    *vision("SegFormer", "Segformer", SEGFORMER, resizes=True),
    *vision("ResNet", "ResNet", RESNET, resizes=True, pixels=32),
    *vision("RegNet", "RegNet", RESNET | {"groups_width": 8}, resizes=True, pixels=32),
    *vision("ConvNeXt V2", "ConvNextV2", CONVNEXT, resizes=True, pixels=32),
    *vision("Swin V2", "Swinv2", SWIN),
    *vision("MobileNet V2", "MobileNetV2", MOBILENET, pixels=32),
    *vision("PoolFormer", "PoolFormer", POOLFORMER, pixels=32),
    *vision("DINOv2 with registers", "Dinov2WithRegisters", VIT, resizes=True),
    *vision("SigLIP, images", "Siglip", SIGLIP | {"num_labels": CLASSES})[1:],
    case("ViTMAE", "ViTMAEForPreTraining", "ViTMAEConfig", VIT_MAE, images, own_loss),
    case("SegFormer, pixels", "SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER, segments),
    case("Wav2Vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SPEECH, wave),
    case("Wav2Vec2, CTC", "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, spoken),
    case("HuBERT", "HubertForSequenceClassification", "HubertConfig", SPEECH, wave),
    case("HuBERT, CTC", "HubertForCTC", "HubertConfig", SPEECH, spoken),
    case("WavLM", "WavLMForSequenceClassification", "WavLMConfig", SPEECH, wave),
    case("Whisper, classes", "WhisperForAudioClassification", "WhisperConfig", WHISPER | SPEECH_CLASSES, recording),
    case("PatchTST", "PatchTSTForPrediction", "PatchTSTConfig", PATCH_TST, series, own_loss, future),
]

CASES = [*LISTED, *BY_HAND, *OTHERS]

# One of each kind, of one block and few batches: a decoder, an encoder, an encoder-decoder, experts, images, and
# embeddings that are the head's too.
BLOCK = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_T5 = T5 | {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
SMALL_MIXTRAL = MIXTRAL | BLOCK | {"num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 2}
SMALL_CONVNEXT = {"num_stages": 1, "hidden_sizes": [8], "depths": [1], "num_labels": CLASSES}
smallest = partial(case, training=((2, 9, True), (2, 12, True)), validation=((2, 9, True),))
SMALLEST = [
    smallest("decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER | BLOCK, tokens, next_token_loss),
    smallest(
        "encoder", "BertForSequenceClassification", "BertConfig", BERT | BLOCK | {"num_labels": CLASSES}, sentence
    ),
    smallest("encoder-decoder", "T5ForConditionalGeneration", "T5Config", SMALL_T5, pair_of_tokens),
    smallest("experts", "MixtralForCausalLM", "MixtralConfig", SMALL_MIXTRAL),
    smallest("images", "ConvNextForImageClassification", "ConvNextConfig", SMALL_CONVNEXT, partial(images, pixels=32)),
    smallest("tied weights", "OPTForCausalLM", "OPTConfig", OPT | BLOCK | {"ffn_dim": 8, "word_embed_proj_dim": 8}),
]
