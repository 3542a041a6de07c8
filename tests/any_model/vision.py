"""Architectures of torchvision and of timm, and a U-Net: small images, three classes, dropout on where there is one."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.any_model.harness import Case


def _import_torchvision():
    """Import torchvision, also where its operators are not to be had."""
    try:
        return __import__("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    # A wheel for another build of torch (CUDA's, beside a torch for the CPU) cannot load its operators, and its import
    # stops at the first that it describes. None of the models here calls one, so it is enough that they have a name.
    for name, schema in (
        ("nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        ("qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        (
            "roi_align",
            "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio, "
            "bool aligned) -> Tensor",
        ),
    ):
        torch.library.define(f"torchvision::{name}", schema)
    return __import__("torchvision")


torchvision = _import_torchvision()
import timm  # noqa: E402  it imports torchvision
from torchvision import models  # noqa: E402
from torchvision.models import segmentation  # noqa: E402

CLASSES = 3
DROPOUT = 0.1

# Samples, and whether the images are larger where the model takes that.
TRAINING = ((4, False), (4, False), (3, True))
VALIDATION = ((2, False), (3, True))
FEW = ((2, False), (2, False), (3, False))  # of large images


# ---- data and losses


def images(side, larger, specs, seed, *, is_dense=False):
    """Batches of images, each with a class, or with one for each pixel."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for samples, is_larger in specs:
        now = (larger or side) if is_larger else side
        pixels = torch.randn(samples, 3, now, now, generator=generator)
        shape = (samples, now, now) if is_dense else (samples,)
        found.append((pixels, torch.randint(CLASSES, shape, generator=generator)))
    return found


def class_loss(output, target):
    """The sum over all logits of the output: heads beside the last one, which some models have in training alone."""
    return sum(F.cross_entropy(logits, target) for logits in pytree.tree_leaves(output))


def case(name, make, side, larger=None, *, training=TRAINING, is_dense=False, is_listed=True):
    """One row; `larger`: side of the last batch's images, where the model takes images of any size."""
    data = partial(images, side, larger, is_dense=is_dense)
    return Case(name, make, partial(data, training, 2), partial(data, VALIDATION, 3), class_loss, is_listed)


# ---- torchvision


def network(name, **options):
    """A function of a model of torchvision by its name there."""
    return partial(getattr(models, name), num_classes=CLASSES, **options)


def vgg():
    """VGG-11 with a narrow classifier, as it is replaced for fine-tuning: its own has 100 million weights."""
    module = models.vgg11_bn(num_classes=CLASSES, init_weights=False)
    module.classifier[0], module.classifier[3] = nn.Linear(512 * 7 * 7, 32), nn.Linear(32, 32)
    module.classifier[6] = nn.Linear(32, CLASSES)
    return module


def alexnet():
    module = models.alexnet(num_classes=CLASSES)
    module.classifier[1], module.classifier[4] = nn.Linear(256 * 6 * 6, 32), nn.Linear(32, 32)
    module.classifier[6] = nn.Linear(32, CLASSES)
    return module


def residual(block, **options):
    return models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **options)


def dense():
    return models.DenseNet(8, (2, 3, 2, 2), 16, bn_size=2, drop_rate=DROPOUT, num_classes=CLASSES)


def dense_with_checkpoints():
    """The same, computing its layers again in the backward pass by itself."""
    return models.DenseNet(8, (2, 3), 16, bn_size=2, num_classes=CLASSES, memory_efficient=True)


def efficientnet():
    widths = (models.efficientnet.MBConvConfig(*each) for each in ((1, 3, 1, 16, 8, 1), (6, 5, 2, 8, 16, 2)))
    return models.EfficientNet(list(widths), DROPOUT, 0.3, CLASSES)


def efficientnet_v2():
    fused, plain = models.efficientnet.FusedMBConvConfig, models.efficientnet.MBConvConfig
    widths = [fused(1, 3, 1, 16, 16, 2), fused(4, 3, 2, 16, 24, 1), plain(4, 3, 2, 24, 32, 2)]
    return models.EfficientNet(widths, DROPOUT, 0.3, CLASSES, partial(nn.BatchNorm2d, eps=1e-3), 64)


def vision_transformer():
    return models.VisionTransformer(32, 8, 2, 2, 16, 32, DROPOUT, DROPOUT, num_classes=CLASSES)


def swin(block, downsample):
    return models.SwinTransformer(
        [2, 2],
        16,
        [2, 2],
        [2, 4],
        [4, 4],
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
        stochastic_depth_prob=0.3,
        num_classes=CLASSES,
        block=block,
        downsample_layer=downsample,
    )


def swin_v1():
    return swin(models.swin_transformer.SwinTransformerBlock, models.swin_transformer.PatchMerging)


def swin_v2():
    return swin(models.swin_transformer.SwinTransformerBlockV2, models.swin_transformer.PatchMergingV2)


def convnext():
    widths = ((16, 32, 2), (32, 64, 2), (64, None, 2))
    blocks = [models.convnext.CNBlockConfig(*each) for each in widths]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.3, num_classes=CLASSES)


def maxvit():
    return models.MaxVit((64, 64), 16, 2, [16, 32], [2, 2], 8, 0.3, num_classes=CLASSES)


def regnet(se_ratio):
    widths = models.regnet.BlockParams.from_init_params(6, 16, 16.0, 2.2, 8, se_ratio=se_ratio)
    return models.RegNet(widths, num_classes=CLASSES)


def segmented(kind, head):
    """A network for pixels, on a ResNet of four blocks, with an auxiliary head."""
    backbone = models._utils.IntermediateLayerGetter(
        residual(models.resnet.BasicBlock), {"layer4": "out", "layer3": "aux"}
    )
    return kind(backbone, head(512, CLASSES), segmentation.fcn.FCNHead(256, CLASSES))


def fcn():
    return segmented(segmentation.FCN, segmentation.fcn.FCNHead)


def deeplab():
    return segmented(segmentation.DeepLabV3, segmentation.deeplabv3.DeepLabHead)


def of_mobile(name):
    return partial(getattr(segmentation, name), weights=None, weights_backbone=None, num_classes=CLASSES)


TORCHVISION = [
    case("ResNet", partial(residual, models.resnet.BasicBlock), 32, 48),
    case("ResNet, bottleneck", partial(residual, models.resnet.Bottleneck, width_per_group=16), 32, 48),
    case("ResNeXt", partial(residual, models.resnet.Bottleneck, groups=8, width_per_group=4), 32, 48),
    case("DenseNet", dense, 32, 48),
    case("DenseNet, memory efficient", dense_with_checkpoints, 32),
    case("MobileNet v2", network("mobilenet_v2", width_mult=0.25, dropout=DROPOUT), 32, 48),
    case("MobileNet v3", network("mobilenet_v3_small", dropout=DROPOUT), 32, 48),
    case("EfficientNet", efficientnet, 32, 48),
    case("EfficientNet v2", efficientnet_v2, 32, 48),
    case("VGG", vgg, 32, 48),
    case("AlexNet", alexnet, 64, 80),
    case("Inception v3", network("inception_v3", init_weights=False), 299, training=FEW),
    case("GoogLeNet", network("googlenet", init_weights=False), 64, 80),
    case("SqueezeNet", network("squeezenet1_1"), 32, 48),
    case("ShuffleNet", network("shufflenet_v2_x0_5"), 32, 48),
    case("MNASNet", network("mnasnet0_5"), 32, 48),
    case("RegNet", partial(regnet, None), 32, 48),
    case("RegNet, squeezed", partial(regnet, 0.25), 32, 48),
    case("ViT", vision_transformer, 32),
    case("Swin v1", swin_v1, 32, 48),
    case("Swin v2", swin_v2, 32, 48),
    case("ConvNeXt, torchvision", convnext, 32, 48),
    case("MaxViT", maxvit, 64),
    case("FCN", fcn, 32, 48, is_dense=True),
    case("DeepLab v3", deeplab, 32, 48, is_dense=True),
    case("DeepLab v3, MobileNet", of_mobile("deeplabv3_mobilenet_v3_large"), 32, is_dense=True),
    case("LR-ASPP", of_mobile("lraspp_mobilenet_v3_large"), 32, 48, is_dense=True),
]


# ---- a U-Net, as people write them


class Convolved(nn.Sequential):
    """Two convolutions with norms, and activations in place."""

    def __init__(self, width, out):
        super().__init__(
            nn.Conv2d(width, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Dropout2d(DROPOUT),
        )


class UNet(nn.Module):
    """What the way down computes is concatenated on the way up, padded where sizes are odd."""

    def __init__(self, widths=(8, 16, 32)):
        super().__init__()
        self.down = nn.ModuleList(Convolved(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.bottom = Convolved(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths))
        self.merged = nn.ModuleList(Convolved(2 * each, each) for each in reversed(widths))
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, block, skip in zip(self.up, self.merged, reversed(skips), strict=True):
            x = up(x)
            height, width = skip.shape[-2] - x.shape[-2], skip.shape[-1] - x.shape[-1]
            x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
            x = block(torch.cat([skip, x], dim=1))
        return self.head(x)


BY_HAND = [case("U-Net", UNet, 32, 44, is_dense=True)]


# ---- timm


def timm_case(name, side, larger=None, *, is_listed=True, **options):
    return case(
        f"timm {name}",
        partial(timm.create_model, name, num_classes=CLASSES, **options),
        side,
        larger,
        is_listed=is_listed,
    )


ON = {"drop_rate": DROPOUT, "drop_path_rate": 0.3}
SMALL = ON | {"img_size": 32}

TIMM = [
    timm_case("resnet10t", 32, 48, **ON),
    timm_case("vit_tiny_patch16_224", 32, depth=2, **SMALL),
    timm_case("swin_tiny_patch4_window7_224", 64, depths=(1, 1, 2, 1), embed_dim=24, **ON, img_size=64, window_size=2),
    timm_case("convnext_atto", 32, 64, **ON),
    timm_case("efficientnet_b0", 32, 48, **ON),
    timm_case("mixer_s32_224", 64, **ON, img_size=64),
    timm_case("deit_tiny_patch16_224", 32, depth=2, **SMALL),
    timm_case("deit_tiny_distilled_patch16_224", 32, depth=2, **SMALL),
    timm_case("beit_base_patch16_224", 32, depth=2, embed_dim=48, **SMALL),
    timm_case("cait_xxs24_224", 32, depth=2, **SMALL),
    timm_case("coat_tiny", 64, **ON, img_size=64),
    timm_case("regnety_002", 32, 48, **ON),
    timm_case("mobilenetv3_small_050", 32, 48, **ON),
    timm_case("densenet121", 32, 48, drop_rate=DROPOUT),
    timm_case("maxvit_rmlp_pico_rw_256", 64, img_size=64, **ON),
    timm_case("levit_128s", 64, img_size=64, **ON),
    timm_case("poolformer_s12", 32, 48, **ON),
    timm_case("xcit_nano_12_p16_224", 32, depth=2, **SMALL),
    timm_case("nfnet_l0", 32, 48, **ON),
    timm_case("rexnet_100", 32, 48, **ON),
    timm_case("volo_d1_224", 64, **ON, img_size=64),
    timm_case("resnest14d", 32, 48, **ON),
]

CASES = [*TORCHVISION, *BY_HAND, *TIMM]
