{{- /*
What the operator may do: `roles`, each with its rules, in a namespace or, without one, in the whole cluster. rbac.yaml grants them,
and `helm test` asks the API server about each. Names of cluster-scoped objects include the namespace of the release: there may be
one release per namespace.
*/}}
{{- define "shoal.roles" -}}
{{- $name := include "shoal.name" . }}
{{- $home := .Release.Namespace }}
{{- $scoped := include "shoal.scope" . }}
{{- $unscoped := printf "%s:%s" $home $name }}
roles:
  # Jobs and their objects. The operator creates Secrets but never reads them.
  - name: {{ ternary $name $unscoped (ne $scoped "") | quote }}
    namespace: {{ $scoped | quote }}
    rules:
      - {apiGroups: [shoal.dev], resources: [trainingjobs], verbs: [get, list, watch, delete]}  # delete: ttlSecondsAfterFinished
      - {apiGroups: [shoal.dev], resources: [trainingjobs/status], verbs: [update, patch]}  # patch: of a job that it cannot read
      - {apiGroups: [shoal.dev], resources: [speedprofiles], verbs: [list, watch, create, delete]}  # delete: of its own, long unused
      - {apiGroups: [shoal.dev], resources: [speedprofiles/status], verbs: [update]}
      - {apiGroups: [""], resources: [pods], verbs: [get, list, watch, create, delete]}
      - {apiGroups: [""], resources: [services], verbs: [get, list, watch, create, patch, delete]}
      - {apiGroups: [""], resources: [secrets], verbs: [create]}
      - {apiGroups: [policy], resources: [poddisruptionbudgets], verbs: [list, watch, create, delete]}
      - {apiGroups: [scheduling.x-k8s.io], resources: [podgroups], verbs: [create, patch]}  # schedulingPolicy.gang
      {{- if (.Values.kueue).enabled }}
      - {apiGroups: [kueue.x-k8s.io], resources: [workloads], verbs: [get, list, watch, create, delete]}  # schedulingPolicy.queueAs
      - {apiGroups: [kueue.x-k8s.io], resources: [workloads/status], verbs: [patch]}
      {{- end }}
      - {apiGroups: [""], resources: [events], verbs: [create, patch]}
  # The Lease.
  - name: {{ printf "%s-lease" $name | quote }}
    namespace: {{ $home | quote }}
    rules:
      - {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}
      - {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [{{ $name | quote }}], verbs: [get, watch, update, patch]}
  {{- if .Values.scope.pools }}
  # CapacityPools are cluster-scoped, as the nodes that they describe.
  - name: {{ printf "%s:pools" $unscoped | quote }}
    namespace: ""
    rules:
      - {apiGroups: [shoal.dev], resources: [capacitypools], verbs: [list, watch]}
      - {apiGroups: [shoal.dev], resources: [capacitypools/status], verbs: [update]}
      - {apiGroups: [scheduling.k8s.io], resources: [priorityclasses], verbs: [list]}  # which job goes first
  {{- if $scoped }}
  # Events about cluster-scoped objects are in the namespace default.
  - name: {{ printf "%s-%s-pool-events" $home $name | quote }}
    namespace: default
    rules:
      - {apiGroups: [""], resources: [events], verbs: [create, patch]}
  {{- end }}
  {{- end }}
  {{- if (.Values.kueue).enabled }}
  # The nodes of an admitted quota, and what a priority class is worth: cluster-scoped, and read only.
  - name: {{ printf "%s:kueue" $unscoped | quote }}
    namespace: ""
    rules:
      - {apiGroups: [kueue.x-k8s.io], resources: [resourceflavors], verbs: [list, watch]}
      - {apiGroups: [kueue.x-k8s.io], resources: [workloadpriorityclasses], verbs: [get]}
      - {apiGroups: [scheduling.k8s.io], resources: [priorityclasses], verbs: [get, list]}
  {{- end }}
  {{- if .Values.scope.nodes }}
  # Nodes signal a disruption before their pods do, so reading them allows earlier replacements.
  - name: {{ printf "%s:nodes" $unscoped | quote }}
    namespace: ""
    rules:
      - {apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}
  {{- end }}
  {{- if not .Values.installKey.existingSecret }}
  # The one Secret that the operator makes for itself, and therefore may read; in the namespace of the release.
  - name: {{ include "shoal.installKey" . | quote }}
    namespace: {{ $home | quote }}
    rules:
      - {apiGroups: [""], resources: [secrets], verbs: [create]}
      - {apiGroups: [""], resources: [secrets], resourceNames: [{{ include "shoal.installKey" . | quote }}], verbs: [get]}
  {{- end }}
{{- end }}

{{- /*
What `shoal-pools` may do, in the same form. Names of objects outside the release's namespace include it.
*/}}
{{- define "shoal.pools.roles" -}}
{{- $name := include "shoal.pools.name" . }}
{{- $home := .Release.Namespace }}
{{- $elsewhere := printf "%s-%s" $home $name }}
roles:
  # Pools: its finalizer, and its part of the status; and what is sized of the whole cluster.
  - name: {{ printf "%s:%s" $home $name | quote }}
    namespace: ""
    rules:
      - {apiGroups: [shoal.dev], resources: [capacitypools], verbs: [list, watch, patch]}
      - {apiGroups: [shoal.dev], resources: [capacitypools/status], verbs: [patch]}
      {{- range .Values.pools.targets }}
      {{- if not .namespace }}
      {{- include "shoal.pools.target" . | nindent 6 }}
      {{- end }}
      {{- end }}
  {{- range $index, $target := .Values.pools.targets }}
  {{- if $target.namespace }}
  - name: {{ printf "%s-target-%d" $elsewhere $index | quote }}
    namespace: {{ $target.namespace | quote }}
    rules:
      {{- include "shoal.pools.target" $target | nindent 6 }}
  {{- end }}
  {{- end }}
  {{- range .Values.pools.bufferNamespaces }}
  - name: {{ printf "%s-buffer" $elsewhere | quote }}
    namespace: {{ . | quote }}
    rules:
      # `apply` is a patch that may create.
      - {apiGroups: [autoscaling.x-k8s.io], resources: [capacitybuffers], verbs: [get, create, patch, delete]}
      - {apiGroups: [""], resources: [podtemplates], verbs: [create, patch, delete]}
  {{- end }}
  # What is once in a cluster is in the namespace default: the Lease, which every release wants, and events about pools.
  - name: {{ printf "%s-cluster" $elsewhere | quote }}
    namespace: default
    rules:
      - {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}
      - {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [shoal-pools], verbs: [get, watch, update, patch]}
      - {apiGroups: [""], resources: [events], verbs: [create, patch]}
{{- end }}
{{- define "shoal.pools.target" -}}
- {apiGroups: [{{ .apiGroup | quote }}], resources: [{{ .resource | quote }}], resourceNames: {{ .names | toJson }}, verbs: [get]}
- {apiGroups: [{{ .apiGroup | quote }}], resources: [{{ printf "%s/scale" .resource | quote }}], resourceNames: {{ .names | toJson }}, verbs: [get, patch]}
{{- end }}
