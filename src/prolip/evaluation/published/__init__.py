"""What papers print for COCO, Flickr30k and CUB, to be read beside one's own results."""
