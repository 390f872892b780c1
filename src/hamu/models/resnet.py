"""ResNets for small images (He et al. 2016, Sec. 4.2): depth 6n+2, three stages.

ResNet-20 is the paper's classifier for CIFAR-10. `AutoModelForImageClassification` loads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import ImageClassifierOutput

from hamu.errors import HamuError


class SmallResNetConfig(PretrainedConfig):
    """Configuration of a `SmallResNet`.

    Args:
        depth: number of weighted layers, 6n+2 (20 in the paper).
        width: channels of the first stage; the next two have twice and four times as many.
        num_channels: channels of the input image.
        image_mean, image_std: per-channel normalisation that the model was trained with, for pixels
            in [0, 1].
    """

    model_type = "small_resnet"

    def __init__(
        self,
        depth: int = 20,
        width: int = 16,
        num_channels: int = 3,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise HamuError(f"a small ResNet has depth 6n+2 (8, 14, 20, 32, ...); got {depth}")
        self.depth = depth
        self.width = width
        self.num_channels = num_channels
        self.image_mean = image_mean
        self.image_std = image_std
        super().__init__(**kwargs)


class _Block(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A: subsample, pad channels)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            x = nn.functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return torch.relu(out + x)


class SmallResNet(PreTrainedModel):
    """The classifier. Input: normalised pixels [B, C, H, W]; output: logits [B, num_labels]."""

    config_class = SmallResNetConfig
    main_input_name = "pixel_values"

    def __init__(self, config: SmallResNetConfig) -> None:
        super().__init__(config)
        width, blocks = config.width, (config.depth - 2) // 6
        self.conv = nn.Conv2d(config.num_channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers = []
        inputs = width
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(blocks):
                layers.append(_Block(inputs, outputs, stride=2 if stage > 0 and block == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, config.num_labels or 0)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
            module.reset_running_stats()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits, and the mean cross-entropy where labels [B] are given."""
        features = self.blocks(torch.relu(self.norm(self.conv(pixel_values))))
        logits = self.classifier(features.mean(dim=(2, 3)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(SmallResNetConfig.model_type, SmallResNetConfig)
AutoModelForImageClassification.register(SmallResNetConfig, SmallResNet)
