# docker build -t hamu .                        on the CPU
# docker build -t hamu --build-arg TORCH=cu128 .  for NVIDIA GPUs; docker run --gpus all ...
# docker run --rm -v "$PWD:/work" hamu unlearn --data records.jsonl ...
FROM python:3.12-slim
ARG TORCH=cpu
WORKDIR /opt/hamu
COPY pyproject.toml README.md LICENSE constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch --index-url https://download.pytorch.org/whl/${TORCH}
# Triton compiles its kernels for a GPU with it.
RUN [ "$TORCH" = cpu ] || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; }
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[quantize]'
WORKDIR /work
ENTRYPOINT ["hamu"]
CMD ["--help"]
