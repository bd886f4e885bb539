# polymoe with its server. See docs/install.md for how to build and run it.
FROM python:3.12-slim

# Where PyTorch comes from. Its builds for CPUs are small; https://pypi.org/simple has those for NVIDIA GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /polymoe
COPY constraints.txt ./
RUN torch=$(grep '^torch==' constraints.txt) && pip install --no-cache-dir --index-url "$TORCH_INDEX" \
        --extra-index-url https://pypi.org/simple "$torch"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY models/sums-gpt-oss-mxfp4 models/sums-gpt-oss-mxfp4
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[serve]'

# A server needs no rights of root.
RUN useradd --create-home polymoe
USER polymoe
WORKDIR /home/polymoe
ENV HF_HUB_DISABLE_TELEMETRY=1

EXPOSE 8000
ENTRYPOINT ["polymoe"]
CMD ["--help"]
