"""Models: ResNet-20 and other image classifiers, language models and adapters, files."""

from hamu.models.classifiers import (
    SmallResNet,
    SmallResNetConfig,
    check_fits,
    class_names,
    load_classifier,
    load_image_processor,
    new_classifier,
)
from hamu.models.storage import first_not_finite

__all__ = ["SmallResNet", "SmallResNetConfig", "check_fits", "class_names", "first_not_finite"]
__all__ += ["load_classifier", "load_image_processor", "new_classifier"]
