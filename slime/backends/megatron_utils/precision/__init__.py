"""Low precision: FP8 and INT4 as the engines compute them, and DeepGEMM."""
