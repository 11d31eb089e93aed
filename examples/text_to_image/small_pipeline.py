"""A small Stable Diffusion pipeline made from nothing, for machines that cannot download one.

    python examples/text_to_image/small_pipeline.py out/small

It has the parts and the folder of a real one, in small, at 64 pixels: a tokenizer whose words are learnt
from the captions, a CLIP text encoder with random weights (so every caption has states of its own, but
similar words are not close to each other), an autoencoder trained on the images for half a minute (through
a random one nothing could be seen), and a U-Net of 46 layers with random weights, for train.py to train.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.optimization import get_scheduler
from images import Captioned, Images, View, read_captions
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

RESOLUTION = 64
TOKENS = 16
WIDTH = 64  # of the text states
LATENT_CHANNELS = 8
VAE_STEPS, VAE_BATCH, VAE_CROP, VAE_LEARNING_RATE = 700, 8, 32, 2e-3


def make(folder: Path, entries: Sequence[Captioned], *, vae_steps: int = VAE_STEPS, seed: int = 0) -> None:
    """Write the pipeline into ``folder``; its autoencoder learns the images of ``entries``."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(folder / "tokenizer", [caption for entry in entries for caption in entry.captions])
    pipeline = StableDiffusionPipeline(
        vae=make_vae(Images(entries, resolution=RESOLUTION), steps=vae_steps, seed=seed),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=make_unet(),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)


def make_tokenizer(folder: Path, captions: Sequence[str]) -> CLIPTokenizer:
    """CLIP's byte-level pairs, learnt on the captions; any other text falls into smaller pieces."""
    end = "</w>"
    learner = Tokenizer(models.BPE(end_of_word_suffix=end))
    learner.normalizer = normalizers.Lowercase()
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word for caption in captions for word in caption.split()]
    learner.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=4096,
            initial_alphabet=letters,
            special_tokens=[letter + end for letter in letters],  # numbered first, or ties fall otherwise each time
            end_of_word_suffix=end,
            show_progress=False,
            min_frequency=1,
        ),
    )
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"]
    ]
    pieces = [*letters, *(letter + end for letter in letters), *(pair.replace(" ", "") for pair in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=TOKENS)


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Two layers, random weights; words weigh more than their places, or all captions would look much alike."""
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            projection_dim=WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        encoder.get_input_embeddings().weight.mul_(5)
    return encoder


def make_unet() -> UNet2DConditionModel:
    """The 46 layers and 12 skips of Stable Diffusion's, 6.9 M random parameters; latents of 16 x 16."""
    return UNet2DConditionModel(
        sample_size=RESOLUTION // 4,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64, 96, 128),
        layers_per_block=2,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,  # which diffusers takes as the number of heads
    )


def make_scheduler() -> DDIMScheduler:
    """The cosine schedule, which leaves small latents readable for longer, down to pure noise; velocity as target."""
    return DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=1,
        clip_sample=False,
    )


def make_vae(images: Images, *, steps: int, seed: int = 0) -> AutoencoderKL:
    """Eight latent channels at a quarter of the size; trained on crops of the images, without noise in the latents."""
    vae = AutoencoderKL(
        sample_size=RESOLUTION,
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=LATENT_CHANNELS,
        mid_block_add_attention=False,
    )
    start_nearly_linear(vae)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(vae.parameters(), lr=VAE_LEARNING_RATE, betas=(0.9, 0.99))
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=20, num_training_steps=steps)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        pixels = _crops(images, generator)
        error = (vae.decode(vae.encode(pixels).latent_dist.mode()).sample - pixels).abs().mean()
        optimizer.zero_grad()
        error.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"autoencoder: step {step} of {steps}, error {error:.3f}, {time.perf_counter() - start:.0f} s")
    with torch.no_grad():
        latents = torch.cat([vae.encode(_crops(images, generator)).latent_dist.mode() for _ in range(8)])
    vae.register_to_config(scaling_factor=1 / float(latents.std()))
    return vae.eval()


def start_nearly_linear(vae: AutoencoderKL) -> None:
    """Blocks that begin as the identity learn an image in a tenth of the steps; latents get no noise of their own."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.orthogonal_(module.weight)
            torch.nn.init.zeros_(module.bias)
    for module in vae.modules():
        if isinstance(module, ResnetBlock2D):
            torch.nn.init.zeros_(module.conv2.weight)
    log_variance = vae.quant_conv
    torch.nn.init.zeros_(log_variance.weight[LATENT_CHANNELS:])
    torch.nn.init.constant_(log_variance.bias[LATENT_CHANNELS:], -30.0)


def _crops(images: Images, generator: torch.Generator) -> Tensor:
    draws = torch.rand(VAE_BATCH, 4, generator=generator).tolist()
    views = [
        View(index=int(index * len(images.entries)), caption="", down=down, right=right, mirrored=mirror < 0.5)
        for index, down, right, mirror in draws
    ]
    return torch.stack([images.pixels(view, VAE_CROP) for view in views])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train_data_dir", type=Path, help="images with captions (default: those of scikit-image)")
    parser.add_argument("--vae_steps", type=int, default=VAE_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.folder, read_captions(args.train_data_dir), vae_steps=args.vae_steps, seed=args.seed)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
