{{/* The name of every object: the release's, which names the chart at least once. */}}
{{- define "kvframework.name" -}}
{{- $name := ternary .Release.Name (printf "%s-kvframework" .Release.Name) (contains "kvframework" .Release.Name) -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that selectors use: they never change. */}}
{{- define "kvframework.selector" -}}
app.kubernetes.io/name: kvframework
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvframework.labels" -}}
{{ include "kvframework.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvframework.image" -}}
{{- $engine := .Values.sidecar.engine.image -}}
{{- if or (eq .Values.image.tag "latest") (regexMatch `:latest$|^[^:@]+$` $engine) -}}
{{- fail "image.tag and sidecar.engine.image need a digest, or a tag that is not latest" -}}
{{- end -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{/* MiB of a size such as 64GiB. */}}
{{- define "kvframework.mebibytes" -}}
{{- mul (regexFind "^[0-9]+" .) (get (dict "MiB" 1 "GiB" 1024 "TiB" 1048576) (regexFind "[A-Z]iB$" .)) -}}
{{- end -}}

{{- define "kvframework.endpoint" -}}
ipc:///run/kvframework/{{ if eq .Values.mode "sidecar" }}node/{{ end }}server.sock
{{- end -}}

{{/* Lines of a TOML table; JSON's scalars and arrays are TOML's. */}}
{{- define "kvframework.table" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end -}}
{{- end -}}

{{/* Refuses, in words, what other values decide, and passwords in the ConfigMap. */}}
{{- define "kvframework.refuse" -}}
{{- $memory := "l1.size and l1.headroom" -}}
{{- range $path, $instead := dict "options.server.endpoint" "socketDirectory" "options.server.admit_uids" "admitUids" "options.l1.capacity" "l1.size" "resources.requests.memory" $memory "resources.limits.memory" $memory -}}
{{- $table := $.Values -}}
{{- range initial (splitList "." $path) }}{{ $table = get $table . }}{{ end -}}
{{- if hasKey $table (last (splitList "." $path)) }}{{ fail (printf "%s cannot be set: use %s" $path $instead) }}{{ end -}}
{{- end -}}
{{- range $index, $tier := .Values.tiers -}}
{{- range $key, $value := $tier.options -}}
{{- if regexMatch `://[^/@]*:[^/@]*@` (toString $value) -}}
{{- fail (printf "tiers[%d].options.%s holds a password: use tiers[%d].secret" $index $key $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* kvf.toml */}}
{{- define "kvframework.toml" -}}
{{- if regexMatch `(?m)^\s*\[(server|l1|observe)\]` .Values.config -}}
{{- fail "config holds [server], [l1] or [observe]: use options.server, options.l1 and l1.size" -}}
{{- end -}}
{{- include "kvframework.refuse" . -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $server := dict "endpoint" (include "kvframework.endpoint" .) -}}
{{- if not $sidecar }}{{ $_ := set $server "admit_uids" .Values.admitUids }}{{ end -}}
{{- $drain := dict -}}
{{- range .Values.tiers -}}
{{- if ne .use "peers" }}{{ $_ := set $drain "drain_s" (sub $.Values.terminationGracePeriodSeconds 15) }}{{ end -}}
{{- end -}}
[server]
{{- include "kvframework.table" (merge $server .Values.options.server $drain) }}
{{- if $sidecar }}

[observe]
listen = "0.0.0.0:9309"
{{- end }}

[l1]
{{- include "kvframework.table" (merge (dict "capacity" .Values.l1.size) .Values.options.l1) }}
{{- range $index, $tier := .Values.tiers }}
{{- $table := dict "use" $tier.use }}
{{- if $tier.volume }}{{ $_ := set $table "path" (printf "/var/cache/kvframework/%d/values" $index) }}{{ end }}
{{- with $tier.peers }}
{{- $nodes := list }}
{{- range .nodes }}{{ $nodes = append $nodes (printf "%s:%d" . (int $tier.peers.port)) }}{{ end }}
{{- $_ := set $table "listen" (printf "0.0.0.0:%d" (int .port)) }}
{{- $_ := set $table "peers" $nodes }}
{{- end }}
{{- with $tier.secret }}
{{- range $option, $key := .files }}
{{- $_ := set $table $option (printf "/etc/kvframework-tiers/%d/%s" $index $key) }}
{{- end }}
{{- end }}

[[l2]]
{{- include "kvframework.table" (merge $table ($tier.options | default dict)) }}
{{- end }}
{{- with .Values.config | trim }}

{{ . }}
{{- end }}
{{ end -}}

{{/* Of the pods of both modes. */}}
{{- define "kvframework.pod" -}}
serviceAccountName: {{ include "kvframework.name" . }}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- include "kvframework.scheduling" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  {{- if .Values.tiers }}
  fsGroup: 10001
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvframework.scheduling" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.Values $key }}
{{ toYaml (dict $key .) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvframework.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* "true" if the next pod of a node takes L1 over from the running one. Two pods share no port and no claim. */}}
{{- define "kvframework.takesOver" -}}
{{- $can := and (eq .Values.mode "daemonset") (eq .Values.rollout "takeover") -}}
{{- range .Values.tiers -}}
{{- if or .peers (and .volume (not (hasKey .volume "hostPath"))) }}{{ $can = false }}{{ end -}}
{{- end -}}
{{- $can -}}
{{- end -}}

{{/* The server's memory is L1 and the headroom. It asks for all of it, since L1 is resident, or where it takes over for
     the headroom alone: room.yaml asks for L1. */}}
{{- define "kvframework.resources" -}}
{{- $headroom := include "kvframework.mebibytes" .Values.l1.headroom -}}
{{- $memory := printf "%dMi" (add (include "kvframework.mebibytes" .Values.l1.size) $headroom) -}}
{{- $asked := ternary (printf "%sMi" $headroom) $memory (eq (include "kvframework.takesOver" .) "true") -}}
requests: {{- toYaml (merge (dict "memory" $asked) .Values.resources.requests) | nindent 2 }}
limits: {{- toYaml (merge (dict "memory" $memory) .Values.resources.limits) | nindent 2 }}
{{- end -}}

{{- define "kvframework.serverMounts" -}}
- {name: socket, mountPath: /run/kvframework}
- {name: config, mountPath: /etc/kvframework, readOnly: true}
{{- range $index, $tier := .Values.tiers }}
{{- if $tier.secret }}
- {name: secret-{{ $index }}, mountPath: /etc/kvframework-tiers/{{ $index }}, readOnly: true}
{{- end }}
{{- if $tier.volume }}
- {name: values-{{ $index }}, mountPath: /var/cache/kvframework/{{ $index }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvframework.serverVolumes" -}}
- name: config
  configMap: {name: {{ include "kvframework.name" . }}}
{{- range $index, $tier := .Values.tiers }}
{{- with $tier.secret }}
- name: secret-{{ $index }}
  secret: {secretName: {{ .name }}, defaultMode: 0440}
{{- end }}
{{- with $tier.volume }}
- name: values-{{ $index }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvframework.directory" -}}
{{- .Values.socketDirectory | default (printf "/run/%s" (include "kvframework.name" .)) -}}
{{- end -}}
