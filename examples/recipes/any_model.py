"""Convert any PyTorch model: vision, sentences, a diffusion transformer."""

# --8<-- [start:imports]
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
)

import fp4pass

torch.manual_seed(0)
# --8<-- [end:imports]

# --8<-- [start:vision]
small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
vision = ViTForImageClassification(
    ViTConfig(**small, num_attention_heads=4, image_size=32, patch_size=8)
).eval()
images = [{"pixel_values": torch.randn(4, 3, 32, 32)} for _ in range(2)]
fp4pass.prepare(vision)
fp4pass.calibrate(vision, images, progress=False)
fp4pass.convert(vision, "nvfp4", rules=[("classifier", None)])
classes = vision(**images[0]).logits  # [4, 2]
# --8<-- [end:vision]

# --8<-- [start:embeddings]
encoder = BertModel(
    BertConfig(**small, num_attention_heads=4, vocab_size=128)
).eval()
sentences = {
    "input_ids": torch.randint(128, (4, 16)),
    "attention_mask": torch.ones(4, 16).long(),
}
before = encoder(**sentences).last_hidden_state.mean(1)
fp4pass.convert(encoder, "nvfp4a16", "sse")
after = encoder(**sentences).last_hidden_state.mean(1)
cosine = nn.functional.cosine_similarity(before, after)
least = cosine.min().item()
print(f"cosine of the embeddings before and after: {least:.4f} at least")
# --8<-- [end:embeddings]


# --8<-- [start:diffusion]
class Block(nn.Module):
    """Attend and transform, modulated by the time step."""

    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU("tanh"),
            nn.Linear(4 * width, width),
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, time):
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(time).unsqueeze(1).chunk(6, -1)
        )
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(
                3, -1
            )
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.out(attended.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


denoiser = Block(64).eval()
# As the sampler calls it.
steps = [(torch.randn(2, 16, 64), torch.randn(2, 64)) for _ in range(4)]
fp4pass.prepare(denoiser)
fp4pass.calibrate(denoiser, steps, progress=False)
fp4pass.convert(
    denoiser, "nvfp4", rules=[("modulation.*", {"weight_only": True})]
)
# --8<-- [end:diffusion]

# --8<-- [start:save]
fp4pass.save(denoiser, "out/denoiser", overwrite=True)
restored = fp4pass.load("out/denoiser", model=Block(64))
same = torch.equal(restored(*steps[0]), denoiser(*steps[0]))
print(f"the loaded denoiser gives the same bits: {same}")
# --8<-- [end:save]
