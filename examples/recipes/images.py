"""Quantize the transformer of a diffusion pipeline, save and load it packed."""

# --8<-- [start:imports]
import diffusers
import torch

import fp4pass
from fp4pass.integrations import Fp4PassConfig

torch.manual_seed(0)
# --8<-- [end:imports]

# --8<-- [start:pipeline]
transformer = diffusers.FluxTransformer2DModel(
    patch_size=1,
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=32,
    num_attention_heads=2,
    joint_attention_dim=64,
    pooled_projection_dim=32,
    axes_dims_rope=[8, 12, 12],
)
vae = diffusers.AutoencoderKL(
    block_out_channels=(16, 16),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=8,
    shift_factor=0.1,
)
# The prompts of this example are embeddings already.
none = dict.fromkeys(
    ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"]
)
pipe = diffusers.FluxPipeline(
    scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    vae=vae.eval(),
    transformer=transformer.eval(),
    **none,
)
pipe.set_progress_bar_config(disable=True)


def paint(pipe, seed):
    """Return the image [1, 3, 16, 16] of a prompt."""
    noise = torch.Generator().manual_seed(seed)
    return pipe(
        prompt_embeds=torch.randn(1, 8, 64, generator=noise),
        pooled_prompt_embeds=torch.randn(1, 32, generator=noise),
        height=16,
        width=16,
        num_inference_steps=4,
        generator=noise,
        output_type="pt",
    ).images


original = paint(pipe, seed=0)
# --8<-- [end:pipeline]

# --8<-- [start:collect]
# What the sampler passes: latents, time steps, embeddings of prompts.
batches = []


def keep(module, args, kwargs):
    batches.append(kwargs)


hook = pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True)
for seed in (1, 2):
    paint(pipe, seed)
hook.remove()
print(f"{len(batches)} batches, the first:")
for name, value in batches[0].items():
    if isinstance(value, torch.Tensor):
        print(f"  {name}: {list(value.shape)}")
# --8<-- [end:collect]

# --8<-- [start:convert]
pipe.transformer.save_pretrained("out/float")
# The layers of time and prompt, which are small, stay dense.
rules = [("time_text_embed.*", None)]
fp4pass.prepare(pipe.transformer, "hessian", rules=rules)
fp4pass.calibrate(pipe.transformer, batches, progress=False)
fp4pass.convert(pipe.transformer, "nvfp4a16", rules=rules, progress=False)
report = fp4pass.report(pipe.transformer)
print(f"{len(report.converted)} layers packed, {len(report.skipped)} skipped")
packed = paint(pipe, seed=0)
change = float((packed - original).norm() / original.norm())
print(f"the image changes by {change:.1%} of its norm")
# --8<-- [end:convert]

# --8<-- [start:save]
pipe.save_pretrained("out/pipeline")
loaded = diffusers.FluxPipeline.from_pretrained("out/pipeline", **none)
loaded.set_progress_bar_config(disable=True)
# Dense layers may differ in a last bit: products depend on where weights lie.
same = torch.allclose(paint(loaded, seed=0), packed, atol=1e-5)
print(f"the loaded pipeline paints the same image: {same}")
# --8<-- [end:save]

# --8<-- [start:loading]
config = Fp4PassConfig("nvfp4a16", rules=rules)
quick = diffusers.FluxTransformer2DModel.from_pretrained(
    "out/float", quantization_config=config
)
print(f"{len(fp4pass.report(quick).converted)} layers packed while loading")
# --8<-- [end:loading]

# --8<-- [start:others]
small = {"attention_head_dim": 32, "num_attention_heads": 2}
prompt = {"encoder_hidden_states": torch.randn(1, 8, 64)}
models = {
    "Qwen-Image": (
        diffusers.QwenImageTransformer2DModel(
            **small,
            in_channels=16,
            out_channels=4,
            num_layers=1,
            joint_attention_dim=64,
            axes_dims_rope=(8, 12, 12),
        ),
        prompt
        | {
            "hidden_states": torch.randn(1, 16, 16),
            "encoder_hidden_states_mask": torch.ones(1, 8).long(),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 4, 4)]],
        },
    ),
    "Stable Diffusion 3": (
        diffusers.SD3Transformer2DModel(
            **small,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
        ),
        prompt
        | {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([500]),
        },
    ),
    "Wan, video": (
        diffusers.WanTransformer3DModel(
            **small,
            in_channels=4,
            out_channels=4,
            text_dim=64,
            freq_dim=32,
            ffn_dim=128,
            num_layers=1,
        ),
        prompt
        | {
            "hidden_states": torch.randn(1, 4, 2, 8, 8),
            "timestep": torch.tensor([500]),
        },
    ),
}
for name, (model, batch) in models.items():
    model.eval()
    fp4pass.prepare(model, "hessian")
    # More of them, from all time steps, in earnest.
    fp4pass.calibrate(model, [batch], progress=False)
    fp4pass.convert(model, "nvfp4a16", progress=False)
    model.save_pretrained("out/one")
    loaded = type(model).from_pretrained("out/one")
    with torch.no_grad():
        same = torch.equal(model(**batch).sample, loaded(**batch).sample)
    print(f"{name}: {len(fp4pass.report(model).converted)} layers, {same}")
# --8<-- [end:others]
