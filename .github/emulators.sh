#!/usr/bin/env bash
# Install the Cloud SDK's emulators of Spanner and Pub/Sub on a machine of GitHub.
set -euo pipefail
curl --fail --silent https://packages.cloud.google.com/apt/doc/apt-key.gpg \
  | sudo gpg --dearmor --yes --output /usr/share/keyrings/cloud.google.gpg
echo "deb [signed-by=/usr/share/keyrings/cloud.google.gpg] https://packages.cloud.google.com/apt cloud-sdk main" \
  | sudo tee /etc/apt/sources.list.d/google-cloud-sdk.list
sudo apt-get update
sudo apt-get install --yes google-cloud-cli google-cloud-cli-spanner-emulator google-cloud-cli-pubsub-emulator \
  default-jre-headless
