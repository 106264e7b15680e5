// kindcheck reads a cluster configuration of kind as kind itself does: into its own types, refusing unknown fields,
// with its own defaults. It prints one line for each node, as JSON. A module of its own, so that it does not change
// the pinned Kubernetes of dev/tools.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"go.yaml.in/yaml/v3"
	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
)

func main() {
	file, err := os.Open(os.Args[1])
	if err != nil {
		fail(err)
	}
	defer file.Close()
	var cluster v1alpha4.Cluster
	decoder := yaml.NewDecoder(file)
	decoder.KnownFields(true)
	if err := decoder.Decode(&cluster); err != nil {
		fail(err)
	}
	if cluster.Kind != "Cluster" || cluster.APIVersion != "kind.x-k8s.io/v1alpha4" {
		fail(fmt.Errorf("not a Cluster of kind.x-k8s.io/v1alpha4 but %s %s", cluster.APIVersion, cluster.Kind))
	}
	v1alpha4.SetDefaultsCluster(&cluster)
	for _, node := range cluster.Nodes {
		line, err := json.Marshal(map[string]any{"role": node.Role, "labels": node.Labels, "image": node.Image, "mounts": len(node.ExtraMounts)})
		if err != nil {
			fail(err)
		}
		fmt.Println(string(line))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
